# Helpers of the scripts in tests/package and tests/checks. A check that fails ends the script.
cmake_policy(VERSION 3.25)

# For builds of whose speed nothing depends: -O3 takes half as long again. Some optimisation there has
# to be for _FORTIFY_SOURCE.
set(FAST_FLAGS "-O1 -DNDEBUG")

# Prints `text` as it is, which an error's own text would not be, and ends the script.
function(fail text)
  message("${text}")
  message(FATAL_ERROR "This check failed.")
endfunction()

# run(<variable> <command>...): runs it, stores what it printed, fails if it fails.
function(run output)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    list(JOIN ARGN " " command)
    fail("${command}\nended with ${result}:\n${text}")
  endif()
  set(${output} "${text}" PARENT_SCOPE)
endfunction()

# run_failing(<sentence> <command>...): runs it, fails unless it fails and prints the sentence,
# however its lines are broken.
function(run_failing sentence)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE text ERROR_VARIABLE text RESULT_VARIABLE result)
  list(JOIN ARGN " " command)
  if(result EQUAL 0)
    fail("${command}\nsucceeded, but should have failed:\n${text}")
  endif()
  string(REGEX REPLACE "[ \n]+" " " one_line "${text}")
  string(FIND "${one_line}" "${sentence}" position)
  if(position EQUAL -1)
    fail("${command}\ndid not say \"${sentence}\" but:\n${text}")
  endif()
endfunction()

# A consumer's numbers, as it prints them.
function(expect_numbers text)
  if(NOT text MATCHES "^14\n28\n16\n32\n$")
    fail("The consumer printed:\n${text}instead of 14 28 16 32")
  endif()
endfunction()

# forget(<build>): what the next configuration of the build tree finds out, it finds out anew; only
# what it knows of the compiler stays, since to ask that takes the longest.
function(forget build)
  file(REMOVE ${build}/CMakeCache.txt)
endfunction()
