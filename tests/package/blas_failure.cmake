# A configuration without a CBLAS that fits ends with one sentence that names the fault and the
# package to install; one that has it does not, or else jansson_failure.cmake would not come to
# jansson.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

set(configure ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR}
              -DCMAKE_C_COMPILER=${C_COMPILER} -DMHA_BUILD_TESTS=OFF -DMHA_BUILD_BENCH=OFF)
set(install "install one (on Debian: apt-get install")

function(refused sentence)
  forget(${WORK}/build)
  run_failing("${sentence}" ${configure} ${ARGN})
endfunction()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK}/empty ${WORK}/foreign ${WORK}/wide)
file(WRITE ${WORK}/foreign/cblas.h "#define CBLAS 1\n")
# The header of a BLAS with 64-bit integers, as far as it matters here.
file(WRITE ${WORK}/wide/cblas.h "#include <stdint.h>
enum CBLAS_ORDER { CblasRowMajor = 101, CblasColMajor };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans };
void cblas_sgemm(enum CBLAS_ORDER, enum CBLAS_TRANSPOSE, enum CBLAS_TRANSPOSE, int64_t, int64_t,
                 int64_t, float, const float *, int64_t, const float *, int64_t, float, float *,
                 int64_t);\n")

list(GET BLAS_LIBRARIES 0 library)
refused("but: there is no cblas.h in ${WORK}/empty; ${install}"
        -DMHA_BLAS_LIBRARIES=${library} -DMHA_BLAS_INCLUDE_DIR=${WORK}/empty)
refused("does not declare cblas_sgemm; ${install} libopenblas-dev)"
        -DMHA_BLAS_LIBRARIES=${library} -DMHA_BLAS_INCLUDE_DIR=${WORK}/foreign)
refused("but: cblas.h in ${WORK}/wide declares cblas_sgemm with 64-bit integers; ${install}"
        -DMHA_BLAS_LIBRARIES=${library} -DMHA_BLAS_INCLUDE_DIR=${WORK}/wide)
refused("(libopenblas64.so) is built with 64-bit integers; ${install}"
        -DMHA_BLAS_LIBRARIES=${WORK}/libopenblas64.so
        -DMHA_BLAS_INCLUDE_DIR=${BLAS_INCLUDE_DIR})
refused("m cannot be linked or does not contain cblas_sgemm; ${install}"
        -DMHA_BLAS_LIBRARIES=m -DMHA_BLAS_INCLUDE_DIR=${BLAS_INCLUDE_DIR} -DCMAKE_C_FLAGS=-O2)
refused("of MHA_BLAS_LIBRARIES and MHA_BLAS_INCLUDE_DIR only one is given; ${install}"
        -DMHA_BLAS_LIBRARIES=m)
refused("MHA_BLAS is ATLAS, which is none of auto, OpenBLAS, BLIS and Generic; ${install}"
        -DMHA_BLAS=ATLAS)
# With nothing where CMake looks, as on a machine without any BLAS.
foreach(pair IN ITEMS auto:libopenblas-dev OpenBLAS:libopenblas-dev BLIS:libblis-dev
                      Generic:libblas-dev)
  string(REGEX MATCH "(.*):(.*)" ignored ${pair})
  refused("library; ${install} ${CMAKE_MATCH_2})" -DMHA_BLAS=${CMAKE_MATCH_1}
          -DCMAKE_FIND_ROOT_PATH=${WORK}/empty -DCMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY
          -DCMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY)
endforeach()

# A header that wants POSIX, as that of BLIS does, is compiled with it.
file(WRITE ${WORK}/posix/cblas.h "#include <pthread.h>
typedef pthread_barrier_t cblas_barrier;
#include \"${BLAS_INCLUDE_DIR}/cblas.h\"\n")
forget(${WORK}/build)
run(text ${configure} "-DMHA_BLAS_LIBRARIES=${BLAS_LIBRARIES}"
    -DMHA_BLAS_INCLUDE_DIR=${WORK}/posix -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
file(STRINGS ${WORK}/build/compile_commands.json lines REGEX "\"command\".*src/engine/blas\\.c")
if(NOT lines MATCHES "-D_POSIX_C_SOURCE")
  fail("blas.c is compiled without POSIX:\n${lines}")
endif()
