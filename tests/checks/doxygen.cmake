# Doxygen has nothing to say against mha.h: every public declaration is documented.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

find_program(doxygen doxygen)
if(NOT doxygen)
  message("SKIPPED: doxygen is not installed")
  return()
endif()
file(REMOVE_RECURSE ${WORK})
set(PROJECT_SOURCE_DIR ${SOURCE})
set(PROJECT_VERSION ${VERSION})
set(doc_dir ${WORK})
configure_file(${SOURCE}/docs/Doxyfile.in ${WORK}/Doxyfile @ONLY)
run(said ${doxygen} ${WORK}/Doxyfile)

# It would say something if there were something to say.
file(READ ${SOURCE}/include/mha.h header)
string(REPLACE "/**< the class of mistake, or MHA_OK */" "" undocumented "${header}")
file(WRITE ${WORK}/source/include/mha.h "${undocumented}")
set(PROJECT_SOURCE_DIR ${WORK}/source)
configure_file(${SOURCE}/docs/Doxyfile.in ${WORK}/Doxyfile @ONLY)
run_failing("Member status (variable) of struct mha_error is not documented"
            ${doxygen} ${WORK}/Doxyfile)
