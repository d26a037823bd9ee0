# What libmha_mpi exports: exactly what its header declares and its linker map names; and it needs no
# BLAS of its own. The header compiles in every language that may include it.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

file(READ ${SOURCE}/include/mha_mpi.h header)
string(REGEX MATCHALL "\nMHA_MPI_API[^;(]*[ *](mha_mpi_[a-z_]+)\\(" declarations "${header}")
string(REGEX REPLACE "\nMHA_MPI_API[^;(]*[ *](mha_mpi_[a-z_]+)\\(" "\\1" declared
                     "${declarations}")
list(SORT declared)
file(STRINGS ${SOURCE}/cmake/libmha_mpi.map mapped REGEX "^ +mha_mpi_[a-z_]+;$")
list(TRANSFORM mapped REPLACE "[ ;]+" "")
list(SORT mapped)
list(LENGTH declared n)
if(n LESS 10 OR NOT declared STREQUAL mapped)
  fail("mha_mpi.h declares\n${declared}\nand libmha_mpi.map has\n${mapped}")
endif()

if(SHARED)
  run(text ${NM} -D --defined-only ${SHARED})
  string(REGEX REPLACE "[0-9a-f]+ A [^\n]+\n" "" text "${text}") # the version's own symbol
  string(REGEX MATCHALL "mha_[a-z_]+" exported "${text}")
  list(SORT exported)
  list(REMOVE_DUPLICATES exported)
  list(REMOVE_ITEM exported mha_mpi_) # the node of the map, mha_mpi_0.1
  if(NOT exported STREQUAL declared)
    fail("${SHARED} exports\n${exported}\nand mha_mpi.h declares\n${declared}")
  endif()
  run(text ${NM} -D --undefined-only ${SHARED})
  if(text MATCHES "cblas_|omp_|pthread_create")
    fail("${SHARED} needs ${CMAKE_MATCH_0}")
  endif()
endif()

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
file(WRITE ${WORK}/header.c "#include <mha_mpi.h>\n#include <mha_mpi.h>\n
void use(mha_mpi_options *options);\nvoid use(mha_mpi_options *options)\n{\n  MHA_INIT(options);\n}\n")
configure_file(${WORK}/header.c ${WORK}/header.cpp COPYONLY)
set(strict -fsyntax-only -Wall -Wextra -Wshadow -Wconversion -Werror -I${SOURCE}/include)
string(REPLACE "|" ";" MPI_INCLUDES "${MPI_INCLUDES}")
foreach(dir IN LISTS MPI_INCLUDES)
  list(APPEND strict -isystem ${dir})
endforeach()
foreach(standard IN ITEMS c99 c11 c17)
  run(ignored ${C_COMPILER} -std=${standard} ${strict} -Wstrict-prototypes -Wc++-compat
      ${WORK}/header.c)
endforeach()
if(CXX_COMPILER)
  foreach(standard IN ITEMS c++11 c++17 c++20)
    run(ignored ${CXX_COMPILER} -std=${standard} ${strict} ${WORK}/header.cpp)
  endforeach()
endif()

# The programs in the documents that begin with it.
set(n 0)
file(GLOB documents ${SOURCE}/README.md ${SOURCE}/docs/*.md)
foreach(document IN LISTS documents)
  file(READ ${document} text)
  string(REPLACE ";" "<semicolon>" text "${text}") # lists would be cut there
  string(REGEX MATCHALL "\n```c\n#include <mha_mpi.h>[^`]*" blocks "${text}")
  foreach(block IN LISTS blocks)
    string(REPLACE "<semicolon>" ";" block "${block}")
    string(REPLACE "\n```c\n" "" block "${block}")
    file(WRITE ${WORK}/block.c "${block}")
    run(ignored ${C_COMPILER} -std=c11 -pedantic-errors ${strict} -Wno-missing-prototypes
        ${WORK}/block.c)
    math(EXPR n "${n} + 1")
  endforeach()
endforeach()
if(n LESS 1)
  fail("No document has a program with mha_mpi.h")
endif()
