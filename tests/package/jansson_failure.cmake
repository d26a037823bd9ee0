# A configuration without jansson ends with one sentence that names the fault and the package to
# install.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

function(refused fault)
  forget(${WORK}/build)
  run_failing("libmha needs jansson 2.11 or later, but: ${fault}; install it (on Debian: apt-get"
              ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR}
              -DCMAKE_C_COMPILER=${C_COMPILER} -DMHA_BUILD_TESTS=OFF -DMHA_BUILD_BENCH=OFF
              "-DMHA_BLAS_LIBRARIES=${BLAS_LIBRARIES}" -DMHA_BLAS_INCLUDE_DIR=${BLAS_INCLUDE_DIR}
              ${ARGN})
endfunction()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK}/empty ${WORK}/old)
file(WRITE ${WORK}/old/jansson.h "#define JANSSON_VERSION \"2.7\"\n")
refused("there is no jansson.h in ${WORK}/empty" -DMHA_JANSSON_INCLUDE_DIR=${WORK}/empty)
refused("jansson.h in ${WORK}/old says version \"2.7\"" -DMHA_JANSSON_INCLUDE_DIR=${WORK}/old)
# With nothing where CMake looks, as on a machine without jansson.
refused("there is no library jansson" -DCMAKE_FIND_ROOT_PATH=${WORK}/empty
        -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY)
