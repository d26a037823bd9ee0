# The binding for C++ is compiled against the shared library of the build tree, without a warning, and
# runs.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
get_filename_component(folder ${SHARED} DIRECTORY)
run(ignored ${CXX_COMPILER} -std=c++17 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror
    -I${SOURCE}/include ${CMAKE_CURRENT_LIST_DIR}/raii.cpp -o ${WORK}/raii ${SHARED}
    -Wl,-rpath,${folder})
execute_process(COMMAND ${WORK}/raii WORKING_DIRECTORY ${WORK} RESULT_VARIABLE result
                ERROR_VARIABLE text)
if(NOT result EQUAL 0)
  fail("The binding ended with ${result}: ${text}")
endif()
