# Options that loosen arithmetic (-ffast-math, -Ofast, their parts) change nothing in what the
# project's own CMake builds, wherever they stand, and a build by hand refuses them.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(parts -ffast-math -Ofast -ffinite-math-only -funsafe-math-optimizations -freciprocal-math
          -fno-signed-zeros "-fassociative-math -fno-signed-zeros -fno-trapping-math")
set(parts_of_gcc -fsingle-precision-constant)
set(parts_of_clang -ffp-model=fast -fassociative-math -fapprox-func
                   -fno-honor-nans -fdenormal-fp-math=preserve-sign)
set(optional -mdaz-ftz) # known to newer releases

# known_spellings(<variable> <compiler>): those that it compiles an empty file with.
function(known_spellings known compiler)
  file(WRITE ${WORK}/empty.c "int nothing;\n")
  run(version ${compiler} --version)
  set(kind gcc)
  if(version MATCHES "clang")
    set(kind clang)
  endif()
  set(list ${parts} ${parts_of_${kind}})
  foreach(spelling IN LISTS optional)
    execute_process(COMMAND ${compiler} ${spelling} -c ${WORK}/empty.c -o ${WORK}/empty.o
                    OUTPUT_QUIET ERROR_QUIET RESULT_VARIABLE result)
    if(result EQUAL 0)
      list(APPEND list ${spelling})
    endif()
  endforeach()
  set(${known} "${list}" PARENT_SCOPE)
  set(kind ${kind} PARENT_SCOPE)
endfunction()

# ---- by hand ----

# What a compiler has a macro for is refused; of clang's parts the rest must change nothing.
function(check_by_hand compiler)
  set(compile ${compiler} -std=c11 -O1 -DMHA_BASELINE -I${SOURCE}/include -I${SOURCE}/src -S)
  run(ignored ${compile} ${SOURCE}/src/engine/softmax.c -o ${WORK}/strict.s)
  foreach(spelling IN LISTS spellings)
    separate_arguments(flags UNIX_COMMAND "${spelling}")
    if(spelling STREQUAL "-fsingle-precision-constant")
      run_failing("compiled with -fsingle-precision-constant; rule: leave it out" ${compile}
                  ${flags} ${SOURCE}/src/engine/softmax.c -o ${WORK}/loose.s)
    elseif((kind STREQUAL "gcc" AND NOT spelling MATCHES "daz") OR spelling MATCHES "fast|finite")
      run_failing("compiled with -ffast-math, -Ofast or a part of them; rule: leave them out"
                  ${compile} ${flags} ${SOURCE}/src/engine/softmax.c -o ${WORK}/loose.s)
    else()
      run(ignored ${compile} ${flags} ${SOURCE}/src/engine/softmax.c -o ${WORK}/loose.s)
      file(READ ${WORK}/strict.s strict)
      file(READ ${WORK}/loose.s loose)
      if(NOT strict STREQUAL loose)
        fail("${compiler} ${spelling} changes softmax.c")
      endif()
    endif()
  endforeach()
endfunction()

# ---- in CMake's targets ----

# One library of the row kernels for each spelling, and for the worst of them in each place where
# flags can stand, all in one project, and the program that loads them one after the other.
function(check_targets compiler)
  set(places)
  foreach(spelling IN LISTS spellings)
    list(APPEND places "string(APPEND CMAKE_C_FLAGS \" ${spelling}\")")
  endforeach()
  foreach(spelling IN ITEMS -Ofast -ffast-math)
    list(APPEND places "string(APPEND CMAKE_C_FLAGS_RELEASE \" ${spelling}\")"
                       "add_compile_options(-fno-fast-math ${spelling})"
                       "string(APPEND CMAKE_SHARED_LINKER_FLAGS \" ${spelling}\")"
                       "add_link_options(-O2 -fno-fast-math ${spelling})")
  endforeach()
  set(project "cmake_minimum_required(VERSION 3.25)
project(spellings LANGUAGES C)
include(${SOURCE}/cmake/compiler.cmake)
function(kernels name)
  add_library(\${name} SHARED ${SOURCE}/src/engine/softmax.c)
  target_include_directories(\${name} PRIVATE ${SOURCE}/include ${SOURCE}/src)
  target_compile_definitions(\${name} PRIVATE MHA_BASELINE)
  target_link_libraries(\${name} PRIVATE m)
  mha_compile_strictly(\${name})
  set_property(GLOBAL APPEND PROPERTY libraries \${name})
endfunction()
kernels(kernels)\n")
  set(n 0)
  foreach(place IN LISTS places)
    math(EXPR n "${n} + 1")
    file(WRITE ${WORK}/${kind}/${n}/CMakeLists.txt "${place}\nkernels(kernels_${n})\n")
    string(APPEND project "add_subdirectory(${n}) # ${place}\n")
  endforeach()
  string(APPEND project "get_property(libraries GLOBAL PROPERTY libraries)
add_executable(arithmetic ${SOURCE}/tests/package/arithmetic.c)
target_link_libraries(arithmetic PRIVATE \${CMAKE_DL_LIBS})
list(TRANSFORM libraries REPLACE .+ \"\$<TARGET_FILE:\\\\0>\" OUTPUT_VARIABLE files)
add_custom_target(check ALL COMMAND arithmetic \${files} VERBATIM)
add_dependencies(check \${libraries})\n")
  file(WRITE ${WORK}/${kind}/CMakeLists.txt "${project}")
  run(ignored ${CMAKE_COMMAND} -S ${WORK}/${kind} -B ${WORK}/${kind}/build -G ${GENERATOR}
      -DCMAKE_C_COMPILER=${compiler} -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS=-Werror
      -DCMAKE_C_FLAGS_RELEASE=-O1)
  run(ignored ${CMAKE_COMMAND} --build ${WORK}/${kind}/build --parallel 2)
  message("${kind}: ${n} libraries")
endfunction()

find_program(gcc gcc)
find_program(clang clang)
foreach(compiler IN ITEMS ${C_COMPILER} ${gcc} ${clang})
  known_spellings(spellings ${compiler})
  if(compiler AND NOT done_with_${kind})
    check_by_hand(${compiler})
    check_targets(${compiler})
    set(done_with_${kind} TRUE)
  endif()
endforeach()

# ---- the project itself ----

# Every target of it, with flags in the environment.
set(ENV{CFLAGS} -Ofast)
set(ENV{LDFLAGS} -ffast-math)
run(ignored ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/whole -G ${GENERATOR}
    -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_BUILD_TYPE=Debug -DCMAKE_C_FLAGS_DEBUG=-ffast-math
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
file(STRINGS ${WORK}/whole/compile_commands.json lines REGEX "\"command\": ")
list(LENGTH lines n)
if(n LESS 100)
  fail("There are only ${n} compilations")
endif()
foreach(line IN LISTS lines)
  if(NOT line MATCHES "-Ofast.* -ffast-math .*-fno-fast-math .*-fno-finite-math-only")
    fail("Fast arithmetic is not taken back in\n${line}")
  endif()
endforeach()

# And as a part of a project that loosens its own arithmetic in all ways at once.
unset(ENV{CFLAGS})
unset(ENV{LDFLAGS})
file(WRITE ${WORK}/parent/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(parent LANGUAGES C)
add_compile_options(-ffast-math -funsafe-math-optimizations)
add_link_options(-Ofast -funsafe-math-optimizations)
add_subdirectory(${SOURCE} mha)
")
run(ignored ${CMAKE_COMMAND} -S ${WORK}/parent -B ${WORK}/parent/build -G ${GENERATOR}
    -DCMAKE_C_COMPILER=${C_COMPILER} "-DCMAKE_C_FLAGS=-ffast-math -DMHA_BASELINE"
    -DCMAKE_SHARED_LINKER_FLAGS=-ffast-math -DMHA_BUILD_STATIC=OFF)
run(ignored ${CMAKE_COMMAND} --build ${WORK}/parent/build --target mha --parallel 2)
run(ignored ${C_COMPILER} -std=c11 -I${SOURCE}/include ${SOURCE}/tests/package/softmax_user.c -o
    ${WORK}/user -L${WORK}/parent/build/mha -lmha -lm)
run(ignored ${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${WORK}/parent/build/mha ${WORK}/user)
