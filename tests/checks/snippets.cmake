# The C programs in README.md and docs/: every ```c block that begins with #include <mha.h> compiles
# without a warning. One with `int main(void)` also runs, and has to end with 0; a main that takes
# arguments is only linked.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

set(fence "```")
set(start "\n${fence}c\n#include <mha.h>\n")
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})

# next_block(): takes the first complete block out of `text` into `block`, "" if there is none, and
# counts it. By positions, since code is full of what CMake takes for lists.
macro(next_block)
  set(block "")
  string(FIND "${text}" "${start}" at)
  if(NOT at EQUAL -1)
    math(EXPR at "${at} + 5")
    string(SUBSTRING "${text}" ${at} -1 text)
    string(FIND "${text}" "\n${fence}\n" end)
    if(end EQUAL -1)
      fail("${document}: a block of C has no end")
    endif()
    string(SUBSTRING "${text}" 0 ${end} block)
    string(SUBSTRING "${text}" ${end} -1 text)
    math(EXPR n "${n} + 1")
  endif()
endmacro()

# check_block(<name>): compiles ${WORK}/<name>.c, and what else its main asks for.
function(check_block name)
  set(compile ${C_COMPILER} -std=c11 -pedantic-errors -Wall -Wextra -Wshadow -Wconversion -Werror
              -fopenmp -pthread -I${SOURCE}/include ${WORK}/${name}.c)
  if(NOT block MATCHES "\nint main\\(")
    run(ignored ${compile} -fsyntax-only)
  elseif(NOT SHARED)
    run(ignored ${compile} -c -o ${WORK}/${name}.o)
  else()
    get_filename_component(folder ${SHARED} DIRECTORY)
    run(ignored ${compile} -O1 -o ${WORK}/${name} ${SHARED} -lm)
    if(block MATCHES "\nint main\\(void\\)")
      run(ignored ${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${folder} ${WORK}/${name})
    endif()
  endif()
endfunction()

file(GLOB documents ${SOURCE}/README.md ${SOURCE}/docs/*.md)
set(total 0)
foreach(document IN LISTS documents)
  get_filename_component(base ${document} NAME_WE)
  file(READ ${document} text)
  set(n 0)
  next_block()
  while(NOT block STREQUAL "")
    file(WRITE ${WORK}/${base}-${n}.c "${block}\n")
    check_block(${base}-${n})
    next_block()
  endwhile()
  math(EXPR total "${total} + ${n}")
endforeach()

if(total LESS 8)
  fail("Only ${total} blocks of C begin with #include <mha.h> in README.md and docs/")
endif()
message("${total} blocks")
