# MHA_XSMM=ON without libxsmm ends with one sentence that names the fault and the ways out; AUTO and
# OFF then build without the engine.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

set(configure ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR}
              -DCMAKE_C_COMPILER=${C_COMPILER} -DMHA_BUILD_TESTS=OFF -DMHA_BUILD_BENCH=OFF
              "-DMHA_BLAS_LIBRARIES=${BLAS_LIBRARIES}" -DMHA_BLAS_INCLUDE_DIR=${BLAS_INCLUDE_DIR})
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK}/new)
# An archive of another release: it only has to be there.
file(WRITE ${WORK}/new/libxsmmgen.a "")
file(WRITE ${WORK}/new/libxsmm_generator.h "void libxsmm_generator_gemm_kernel(void);\n")

function(refused fault)
  forget(${WORK}/build)
  run_failing("MHA_ENGINE_XSMM needs libxsmm 1.17, but: ${fault}; install it (on Debian: apt-get"
              ${configure} -DMHA_XSMM=ON ${ARGN})
endfunction()

set(other_release -DMHA_XSMM_LIBRARY=${WORK}/new/libxsmmgen.a -DMHA_XSMM_INCLUDE_DIR=${WORK}/new)
refused("there is no libxsmm_generator.h" -DMHA_XSMM_LIBRARY=${WORK}/new/libxsmmgen.a
        -DMHA_XSMM_INCLUDE_DIR=${WORK})
refused("libxsmm_generator.h in ${WORK}/new is not that of libxsmm 1.17" ${other_release})

# built_without(<option>...): no part of libxsmm is asked for.
function(built_without)
  forget(${WORK}/build)
  run(ignored ${configure} ${ARGN})
  file(STRINGS ${WORK}/build/mha-config.cmake lines REGEX "MhaXsmm")
  if(lines)
    fail("${ARGN} builds with libxsmm: ${lines}")
  endif()
endfunction()

built_without(-DMHA_XSMM=OFF)
built_without(-DMHA_XSMM=AUTO ${other_release})
