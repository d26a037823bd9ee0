# One line of the plain compiler builds the library, without CMake's help, and it computes.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
file(GLOB sources ${SOURCE}/src/*/*.c)
list(FILTER sources EXCLUDE REGEX "/src/(cli|mpi|mpicli)/|/engine/xsmm\\.c$") # without_xsmm.c stands for it
run(ignored ${C_COMPILER} -std=c11 -O1 -pthread -shared -fPIC -I${SOURCE}/include -I${SOURCE}/src
    ${BLAS_OPTIONS} -I${BLAS_INCLUDE_DIR} -I${JANSSON_INCLUDE_DIR} ${sources} -o ${WORK}/libmha.so
    ${BLAS_LIBRARIES} ${JANSSON_LIBRARY} -lm)
run(ignored ${C_COMPILER} -std=c11 -I${SOURCE}/include ${CONSUMER}/consumer.c -o ${WORK}/consumer
    -L${WORK} -lmha -lm)
run(numbers ${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${WORK} ${WORK}/consumer)
expect_numbers("${numbers}")
