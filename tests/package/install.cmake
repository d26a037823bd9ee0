# Builds and installs the library from SOURCE into WORK, moves the prefix and deletes the build
# tree, so that nothing can lean on either; then looks for traces of them in what was installed.
# Afterwards WORK/moved is a whole installation, WORK/static-only one without libmha.so, and
# WORK/static-build one that was built without it.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})

function(install_to folder)
  run(ignored ${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR}
      -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_BUILD_TYPE=Release -DMHA_BUILD_TESTS=OFF
      -DMHA_BUILD_BENCH=OFF -DCMAKE_INSTALL_PREFIX=${WORK}/prefix ${ARGN})
  run(ignored ${CMAKE_COMMAND} --build ${WORK}/build --parallel 2)
  foreach(component IN ITEMS Runtime Development Tools)
    run(ignored ${CMAKE_COMMAND} --install ${WORK}/build --component ${component})
  endforeach()
  file(RENAME ${WORK}/prefix ${WORK}/${folder})
  file(REMOVE_RECURSE ${WORK}/build)
endfunction()

install_to(moved)
install_to(static-build -DMHA_BUILD_SHARED=OFF -DMHA_BUILD_CLI=OFF)

file(GLOB_RECURSE installed RELATIVE ${WORK}/moved LIST_DIRECTORIES FALSE ${WORK}/moved/*)
list(JOIN installed "\n" text)
message("Installed:\n${text}")
foreach(name IN ITEMS bin/mha include/mha.h libmha.so libmha.a mha.pc mha-config.cmake
                      mha-config-version.cmake FindMhaCBLAS.cmake FindMhaJansson.cmake
                      share/man/man1/mha.1)
  if(NOT text MATCHES "(^|[/\n])${name}($|\n)")
    fail("${name} is not installed")
  endif()
endforeach()
foreach(name IN LISTS installed)
  file(READ ${WORK}/moved/${name} content HEX)
  foreach(folder IN ITEMS ${WORK} ${SOURCE})
    string(HEX "${folder}/" needle)
    string(FIND "${content}" "${needle}" position)
    if(NOT position EQUAL -1)
      fail("${name} contains the path ${folder}")
    endif()
  endforeach()
endforeach()

file(COPY ${WORK}/moved/ DESTINATION ${WORK}/static-only)
file(GLOB_RECURSE shared ${WORK}/static-only/libmha.so* ${WORK}/static-only/mha-shared-targets*)
file(REMOVE ${shared} ${WORK}/static-only/bin/mha)
