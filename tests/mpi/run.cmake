# `mha-mpi run` on a trained layer: by heads, by positions and both, against the outputs that came with
# it and against `mha run`; and what is wrong is said once.
#   EXEC  mpiexec with what stands before the number of processes; CLI, MPI_CLI, COMPARE  programs
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

set(data ${SOURCE}/tests/data/real)
set(layer --weights ${data}/weights_hf.safetensors --heads 8 --input ${data}/x.npy)
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(y ${WORK}/y.npy)
set(weights ${WORK}/weights.npy)

function(spread n)
  run(ignored ${EXEC} ${n} ${MPI_CLI} run ${layer} --output ${y} ${ARGN})
endfunction()

foreach(n IN ITEMS 1 2 4)
  spread(${n} --attn-weights ${weights})
  run(ignored ${COMPARE} ${y} ${data}/y.npy 2e-5)
  run(ignored ${COMPARE} ${weights} ${data}/attn.npy 2e-6)
endforeach()
foreach(ways IN ITEMS 1 2)
  file(REMOVE ${y})
  spread(4 --by-heads=${ways})
  run(ignored ${COMPARE} ${y} ${data}/y.npy 2e-5)
endforeach()

run(ignored ${CLI} run ${layer} --causal --output ${WORK}/causal.npy --lse ${WORK}/lse.npy)
spread(2 --causal --steps --lse ${WORK}/lse_of_steps.npy)
run(ignored ${COMPARE} ${y} ${WORK}/causal.npy 1e-5)
run(ignored ${COMPARE} ${WORK}/lse_of_steps.npy ${WORK}/lse.npy 1e-5)
spread(2 --causal --by-heads=1 --lse ${WORK}/lse_of_rows.npy)
run(ignored ${COMPARE} ${y} ${WORK}/causal.npy 1e-5)
run(ignored ${COMPARE} ${WORK}/lse_of_rows.npy ${WORK}/lse.npy 1e-5)

# The way back, with the layer's own input as what comes from above.
file(COPY_FILE ${data}/y.npy ${WORK}/dy.npy)
run(ignored ${CLI} run ${layer} --output ${y} --backward ${WORK}/dy.npy --gradients ${WORK}/alone)
spread(2 --backward ${WORK}/dy.npy --gradients ${WORK}/spread)
file(GLOB names RELATIVE ${WORK}/alone ${WORK}/alone/*.npy)
list(LENGTH names n)
if(n LESS 8)
  fail("There are ${n} gradients: ${names}")
endif()
foreach(name IN LISTS names)
  run(ignored ${COMPARE} ${WORK}/spread/${name} ${WORK}/alone/${name} 1e-3)
endforeach()

# refused(<sentence> <option>...): all processes end, and one of them says why.
function(refused sentence)
  execute_process(COMMAND ${EXEC} 2 ${MPI_CLI} run ${ARGN} OUTPUT_VARIABLE text
                  ERROR_VARIABLE text RESULT_VARIABLE result TIMEOUT 60)
  string(REPLACE ";" "," text "${text}")
  string(REGEX MATCHALL "mha-mpi: [^\n]*" said "${text}")
  list(LENGTH said n)
  if(result EQUAL 0 OR NOT n EQUAL 1 OR NOT said MATCHES "${sentence}")
    fail("It ended with ${result} and said ${n} sentences, not \"${sentence}\":\n${text}")
  endif()
endfunction()
refused("does not exist" --weights ${WORK}/none --heads 8 --input ${data}/x.npy --output ${y})
refused("unknown option" --bogus)
refused("rules.dropout" ${layer} --output ${y} --dropout 0.5 --seed 1)
refused("--by-heads" --by-heads=0)
refused("divides" ${layer} --output ${y} --by-heads=3)
refused("divides the heads" --weights ${data}/weights_hf.safetensors --heads 5 --input
        ${data}/x.npy --output ${y})
