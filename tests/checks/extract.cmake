# Writes the first block of C of ${document} into ${OUTPUT}, for a test that includes it.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/blocks.cmake)

file(READ ${document} text)
set(n 0)
next_block()
if(block STREQUAL "")
  fail("${document} has no block of C")
endif()
file(WRITE ${OUTPUT} "${block}\n")
