# Who may know what: each rule names a pattern and the only files of src/ in which it may stand.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

file(GLOB_RECURSE files RELATIVE ${SOURCE} ${SOURCE}/src/*.c ${SOURCE}/src/*.h)
set(faults "")

# only(<pattern> <files that may>): comments are not looked at.
function(only pattern allowed)
  foreach(file IN LISTS files)
    if(file MATCHES "${allowed}")
      continue()
    endif()
    file(READ ${SOURCE}/${file} text)
    string(REGEX REPLACE "/\\*([^*]|\\*+[^*/])*\\*+/" " " text "${text}")
    if(text MATCHES "(^|[^A-Za-z0-9_])(${pattern})")
      string(APPEND faults "${file}: ${CMAKE_MATCH_2} belongs to ${allowed}\n")
    endif()
  endforeach()
  set(faults "${faults}" PARENT_SCOPE)
endfunction()

only("cblas\\.h|cblas_[a-z]+|openblas_|bli_[a-z]" "^src/blas\\.c$")
only("omp\\.h|omp_[a-z]+|#pragma omp" "^src/openmp\\.c$")
only("(malloc|calloc|realloc|aligned_alloc|posix_memalign|free|strdup) *\\("
     "^src/memory\\.c$|^src/cli/")
only("(v?f?printf|puts|fputs|perror|exit|abort|_Exit) *\\(" "^src/cli/")
only("stderr|stdout|assert\\.h" "^src/cli/")
only("pthread|<threads\\.h>" "^src/(blas|blas_threads|parallel|pool|fork)\\.c$")
# Files know nothing of BLAS and of the layer's computation.
only("\"files/[a-z]+\\.h\"" "^src/(files|cli)/")
foreach(file IN LISTS files)
  if(file MATCHES "^src/files/")
    file(STRINGS ${SOURCE}/${file} lines
         REGEX "#include \"(blas|parallel|attention|softmax|forward|context|visibility)\\.h\"")
    if(lines)
      string(APPEND faults "${file}: ${lines}\n")
    endif()
  endif()
endforeach()

list(LENGTH files n_files)
if(n_files LESS 20)
  fail("Only ${n_files} files were found in ${SOURCE}/src")
endif()
if(faults)
  fail("${faults}")
endif()
