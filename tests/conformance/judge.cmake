# The runner is trustworthy: it passes what is right, and whatever is wrong, hidden or missing makes
# it fail and say so. ARRAYS and RUNNER are the two programs.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK}/arrays)
run(ignored ${ARRAYS} ${WORK}/arrays)

# array(<name> <file>): its line in case.json.
function(array name file)
  set(${name} "\"${name}\": {\"file\": \"../../../arrays/${file}.npy\", \"dtype\": \"float32\", \
\"shape\": [1, 1, 2, 2]}" PARENT_SCOPE)
endfunction()
foreach(name IN ITEMS Q K V)
  array(${name} ${name})
endforeach()
array(Y right)
array(qk_matmul_output right)
array(surprise V)

set(right_case "{
\"name\": \"a_case\", \"op\": \"Attention\", \"layout\": \"4D\",
\"attributes\": {\"is_causal\": 0},
\"dims\": {\"batch\": 1, \"q_num_heads\": 1, \"kv_num_heads\": 1, \"q_len\": 2, \"kv_len\": 2,
  \"past_len\": 0, \"total_len\": 2, \"head_size\": 2, \"v_head_size\": 2},
\"inputs\": {${Q}, ${K}, ${V}},
\"outputs\": {${Y}},
\"suggested_tolerance\": {\"atol\": 1e-5, \"rtol\": 0}}
")

# write_case(<root> <from> <to>): the right case but for one thing.
function(write_case root from to)
  string(REPLACE "${from}" "${to}" text "${right_case}")
  if(text STREQUAL right_case)
    fail("\"${from}\" changes nothing in\n${right_case}")
  endif()
  file(WRITE ${WORK}/${root}/onnx-attention/a_case/case.json "${text}")
endfunction()

# expect_failure(<sentence> <from> <to>): with this one change the runner fails and says so.
function(expect_failure sentence from to)
  write_case(changed "${from}" "${to}")
  run_failing("${sentence}" ${RUNNER} ${WORK}/changed onnx-attention)
endfunction()

# ---- What passes ----

file(WRITE ${WORK}/right/onnx-attention/a_case/case.json "${right_case}")
write_case(near right.npy near.npy)
foreach(root IN ITEMS right near)
  run(text ${RUNNER} ${WORK}/${root} onnx-attention)
  if(NOT text MATCHES "pass a_case .*onnx-attention: 1 passed, 0 failed, 0 cannot")
    fail("${text}")
  endif()
endforeach()

# ---- Wrong numbers ----

expect_failure("FAIL a_case: Y[0][0][1][1] is 3, expected 3.00002" right.npy far.npy)
expect_failure("FAIL a_case: Y[0][0][0][1] is 3, expected inf" right.npy infinite.npy)
expect_failure("FAIL a_case: Y[0][0][1][0] is 2, expected nan" right.npy not_a_number.npy)
expect_failure("FAIL a_case: qk_matmul_output[0][0][0][0] is 0, expected 2" "${Y}"
               "${Y}, ${qk_matmul_output}")

# ---- Cases that cannot be read ----

expect_failure("FAIL a_case: MHA_ERROR_IO: " right.npy absent.npy)
expect_failure("FAIL a_case: case.json cannot be read" "{" "(")
expect_failure("FAIL a_case: case.json is that of \"another\"" a_case another)
expect_failure("FAIL a_case: suggested_tolerance lacks" 1e-5 null)
expect_failure("FAIL a_case: dims lacks batch" batch batches)
expect_failure("has another shape in its file" "2, 2]" "2, 3]")
expect_failure("FAIL a_case: Q has the shape (1, 1, 2, 2), but dims and layout say (1, 1, 3, 2)"
               "\"q_len\": 2" "\"q_len\": 3")
expect_failure("FAIL a_case: there is no input V" "${V}" "${surprise}")
expect_failure("FAIL a_case: no output was compared" "${Y}" "")

# ---- What is not translated is named, and as no such case is expected, the run fails ----

expect_failure("cannot a_case: the input surprise is not translated" "${V}" "${V}, ${surprise}")
expect_failure("cannot a_case: the output surprise is not translated" "${Y}" "${Y}, ${surprise}")
expect_failure("cannot a_case: the attribute surprise is not translated" is_causal surprise)
expect_failure("cannot a_case: the operator \"Surprise\" is not translated" Attention Surprise)
expect_failure("cannot a_case: the layout \"5D\" is not translated" 4D 5D)
expect_failure("cannot a_case: Q is of the type bfloat16" float32 bfloat16)
expect_failure("the cases that cannot be expressed are not the expected ones" 4D 5D)

# ---- Nothing to compare is no success ----

file(MAKE_DIRECTORY ${WORK}/empty/onnx-attention ${WORK}/no_family
     ${WORK}/stranger/onnx-attention/a_case ${WORK}/stranger/new-family)
file(WRITE ${WORK}/stranger/onnx-attention/a_case/case.json "${right_case}")
run_failing("FAIL onnx-attention: there is no case" ${RUNNER} ${WORK}/empty onnx-attention)
run_failing("FAIL onnx-attention: the folder " ${RUNNER} ${WORK}/no_family onnx-attention)
run_failing("FAIL new-family: no translator knows the folder" ${RUNNER} ${WORK}/stranger
            onnx-attention)
run_failing("rule: one of ort-attention" ${RUNNER} ${WORK}/right new-family)
