# The runner of gradients is trustworthy: it passes what is right, and whatever is wrong, unknown or
# missing makes it fail and say so. ARRAYS and RUNNER are the two programs.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK}/arrays)
run(ignored ${ARRAYS} ${WORK}/arrays)

set(type "[\"float32\", [1, 2, 2]]")
set(right_case "{
\"name\": \"a_case\", \"seed\": 1,
\"options\": {\"n_heads\": 1, \"n_kv_heads\": 1, \"head_size\": 2, \"value_head_size\": 2,
  \"orientation\": \"out_in\", \"scale\": 1.0, \"softcap\": 0},
\"inputs\": {\"query\": ${type}, \"key\": ${type}, \"value\": ${type}, \"dy\": ${type}},
\"expected\": {\"y\": ${type}, \"d_query\": ${type}, \"d_key\": ${type}, \"d_value\": ${type}}}
")

# write_case(<folder> <from> <to>): the right case but for one thing in case.json.
function(write_case folder from to)
  string(REPLACE "${from}" "${to}" text "${right_case}")
  if(text STREQUAL right_case AND NOT from STREQUAL to)
    fail("\"${from}\" changes nothing in\n${right_case}")
  endif()
  file(REMOVE_RECURSE ${WORK}/${folder})
  file(MAKE_DIRECTORY ${WORK}/${folder}/a_case)
  file(WRITE ${WORK}/${folder}/a_case/case.json "${text}")
  foreach(name IN ITEMS query key value dy y d_query d_key d_value)
    file(COPY ${WORK}/arrays/${name}.npy DESTINATION ${WORK}/${folder}/a_case)
  endforeach()
endfunction()

# expect_failure(<sentence> <from> <to>): with this one change of case.json the runner fails and says
# so. With <file> <array> the case's file is that array.
function(expect_failure sentence from to)
  write_case(changed "${from}" "${to}")
  if(ARGC EQUAL 5)
    file(COPY_FILE ${WORK}/arrays/${ARGV4}.npy ${WORK}/changed/a_case/${ARGV3}.npy)
  endif()
  run_failing("FAIL a_case: ${sentence}" ${RUNNER} ${WORK}/changed)
endfunction()

# ---- What passes ----

write_case(right "" "")
run(text ${RUNNER} ${WORK}/right)
if(NOT text MATCHES "pass a_case .*gradients: 1 passed, 0 failed")
  fail("${text}")
endif()

# ---- Wrong numbers ----

expect_failure("element 3 of d_value is 0.5, the judge's, expected 0.50002" "" "" d_value
               d_value_far)
expect_failure("element 1 of d_value is 0.5, the judge's, expected nan" "" "" d_value d_value_nan)
expect_failure("element 0 of y is 2, the judge's, expected 1" "" "" y value)
expect_failure("element 0 of d_query is 1.5, the judge's, expected 1" 1.0 1.5)

# ---- What is not known ----

expect_failure("the option scales is not known" scale scales)
expect_failure("the option orientation has a value that is not known" out_in sideways)
expect_failure("the option scale has a value that is not known" 1.0 "\"1\"")
expect_failure("surprise in case.json is not known" seed surprise)
expect_failure("the input surprise is not known" "\"dy\"" "\"surprise\": ${type}, \"dy\"" surprise dy)
expect_failure("d_surprise is expected and was not compared" "\"d_key\""
               "\"d_surprise\": ${type}, \"d_key\"" d_surprise d_key)
expect_failure("d_wq has 4 numbers, the judge's 0" "\"d_key\"" "\"d_wq\": ${type}, \"d_key\""
               d_wq d_key)
expect_failure("case.json does not name the file d_key.npy" ", \"d_key\": ${type}" "")
expect_failure("case.json does not name the file extra.npy" "" "" extra dy)

# ---- What cannot be read ----

expect_failure("case.json cannot be read" "{" "(")
expect_failure("case.json is that of \"another\"" a_case another)
expect_failure("MHA_ERROR_IO: " "\"d_key\"" "\"d_surprise\": ${type}, \"d_key\"")
expect_failure("query is not of the type and shape" "\"query\": [\"float32\""
               "\"query\": [\"float64\"")
expect_failure("query is not of the type and shape" "\"query\": [\"float32\", [1, 2, 2]"
               "\"query\": [\"float32\", [1, 4, 1]")
expect_failure("query is not of the type and shape" "" "" query Q)
expect_failure("the options lack" "\"head_size\": 2, " "")
expect_failure("query_lengths has 2 numbers, not 1" "\"softcap\": 0" "\"query_lengths\": [1, 2]")
expect_failure("key_lengths has a number that is out of range" "\"softcap\": 0"
               "\"key_lengths\": [3]")

# ---- Nothing to compare is no success ----

write_case(bare ", \"d_query\": ${type}, \"d_key\": ${type}, \"d_value\": ${type}" "")
file(REMOVE ${WORK}/bare/a_case/d_query.npy ${WORK}/bare/a_case/d_key.npy
     ${WORK}/bare/a_case/d_value.npy)
run_failing("FAIL a_case: no gradient was compared" ${RUNNER} ${WORK}/bare)
file(MAKE_DIRECTORY ${WORK}/empty)
run_failing("FAIL: there is no case" ${RUNNER} ${WORK}/empty)
run_failing("FAIL: the folder " ${RUNNER} ${WORK}/nowhere)
