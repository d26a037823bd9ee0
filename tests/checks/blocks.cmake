# The blocks of C in the documents: those that begin with #include <mha.h>.
set(fence "```")
set(start "\n${fence}c\n#include <mha.h>\n")

# next_block(): takes the first complete block out of `text` into `block`, "" if there is none, and
# counts it in `n`. By positions, since code is full of what CMake takes for lists.
macro(next_block)
  set(block "")
  string(FIND "${text}" "${start}" at)
  if(NOT at EQUAL -1)
    math(EXPR at "${at} + 6")
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
