# What find_package must refuse: other releases, and the static library where no CBLAS or no jansson
# fits.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

function(refused sentence)
  forget(${WORK}/refuse)
  run_failing("${sentence}" ${CMAKE_COMMAND} -S ${CONSUMER} -B ${WORK}/refuse -G ${GENERATOR}
              -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_PREFIX_PATH=${WORK}/moved
              -DCONSUMER_TARGET=mha::mha ${ARGN})
endfunction()

file(REMOVE_RECURSE ${WORK}/refuse)
string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" ignored ${VERSION})
math(EXPR next_minor "${CMAKE_MATCH_2} + 1")
math(EXPR next_major "${CMAKE_MATCH_1} + 1")
foreach(version IN ITEMS ${CMAKE_MATCH_1}.${next_minor} ${next_major}.0 0.0)
  refused("compatible with requested version \"${version}\"" -DCONSUMER_LANGUAGES=C
          -DCONSUMER_VERSION=${version})
endforeach()
refused("This installation of mha has no component \"unknown\"."
        -DCONSUMER_LANGUAGES=C -DCONSUMER_COMPONENTS=unknown)
# A program in C++ alone may use the shared library, but CBLAS is looked for in C.
refused("The static library of mha needs CMake 3.25 and the language C"
        -DCONSUMER_LANGUAGES=CXX -DCONSUMER_COMPONENTS=static)
file(MAKE_DIRECTORY ${WORK}/empty)
refused("libmha needs a CBLAS with 32-bit integers, but: there is no cblas.h in ${WORK}/empty"
        -DCONSUMER_LANGUAGES=C -DCONSUMER_COMPONENTS=static
        -DMHA_BLAS_LIBRARIES=m -DMHA_BLAS_INCLUDE_DIR=${WORK}/empty)
refused("libmha needs jansson 2.11 or later, but: there is no jansson.h in ${WORK}/empty; install"
        -DCONSUMER_LANGUAGES=C -DCONSUMER_COMPONENTS=static
        -DMHA_JANSSON_INCLUDE_DIR=${WORK}/empty)
