# Configures, builds and runs the project in CONSUMER against an installation that install.cmake
# made. HOW tells by which way the library is found.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

# The consumers that build the library themselves share a tree, one after the other: all is
# configured anew, but the library's objects, which are the same for all of them, stay.
set(dir ${WORK}/consume-${HOW}-${LANGUAGES})
if(HOW MATCHES "^subdirectory")
  set(dir ${WORK}/consume-subdirectory)
  file(REMOVE ${dir}/consumer)
else()
  file(REMOVE_RECURSE ${dir})
endif()
file(MAKE_DIRECTORY ${dir})

set(target mha::mha)
set(options)
set(prefix ${WORK}/moved)
# Nothing that the system knows may stand in for what the package should bring.
set(ENV{PKG_CONFIG_PATH} "")
set(ENV{CMAKE_PREFIX_PATH} "")

if(HOW STREQUAL "static")
  set(target mha::mha_static)
  set(options -DCONSUMER_COMPONENTS=static)
elseif(HOW MATCHES "^static_(only|build)$")
  set(prefix ${WORK}/static-${CMAKE_MATCH_1})
elseif(HOW STREQUAL "without_blas")
  # Who links the shared library needs neither BLAS nor jansson to be installed for
  # development.
  set(ENV{PKG_CONFIG_LIBDIR} ${dir})
  foreach(package IN ITEMS BLAS Threads PkgConfig)
    list(APPEND options -DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON)
  endforeach()
  list(APPEND options -DMHA_BLAS_LIBRARIES=${dir}/none.so -DMHA_BLAS_INCLUDE_DIR=${dir}
       -DMHA_JANSSON_LIBRARY=${dir}/none.so -DMHA_JANSSON_INCLUDE_DIR=${dir})
elseif(HOW STREQUAL "build_tree")
  set(prefix ${BUILD_TREE})
elseif(HOW STREQUAL "subdirectory")
  set(options -DCONSUMER_SOURCE=${SOURCE})
elseif(HOW STREQUAL "subdirectory_static")
  set(options -DCONSUMER_SOURCE=${SOURCE})
  set(target mha::mha_static)
elseif(NOT HOW STREQUAL "shared")
  fail("HOW is ${HOW}")
endif()

# A list as the value of an option has to reach the other cmake in one piece.
string(REPLACE "+" "\\;" languages "${LANGUAGES}")
run(ignored ${CMAKE_COMMAND} --fresh -S ${CONSUMER} -B ${dir} -G ${GENERATOR}
    -DCMAKE_C_COMPILER=${C_COMPILER} -DCONSUMER_LANGUAGES=${languages} -DCONSUMER_TARGET=${target}
    -DCONSUMER_VERSION=${VERSION} -DCMAKE_PREFIX_PATH=${prefix} ${options})
run(ignored ${CMAKE_COMMAND} --build ${dir} --parallel 2)
run(numbers ${dir}/consumer)
expect_numbers("${numbers}")
