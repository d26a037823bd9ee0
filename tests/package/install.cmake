# Builds the library from SOURCE in WORK/build, installs and uninstalls it, installs it again and
# moves the prefix; then looks for traces of the source, the build tree and the first prefix in what
# was installed, so that nothing can lean on them. Afterwards WORK/moved is a whole installation,
# WORK/static-only one without libmha.so, and WORK/static-build one that was built without it.
# The build tree stays for deb.cmake, so it is compiled as the preset deb says, only faster.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/uninstall.cmake)

set(build ${WORK}/build)
set(prefix "${WORK}/a prefix")
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})

function(build_with)
  run(ignored ${CMAKE_COMMAND} -S ${SOURCE} --preset deb -B ${build} -G ${GENERATOR} -DMHA_MPI=OFF
      -DCMAKE_C_COMPILER=${C_COMPILER} "-DCMAKE_C_FLAGS_RELEASE=${FAST_FLAGS}" -DMHA_DEBIAN=OFF
      "-DCMAKE_INSTALL_PREFIX=${prefix}" ${ARGN})
  run(ignored ${CMAKE_COMMAND} --build ${build} --parallel 2)
endfunction()

function(install_to folder)
  foreach(component IN ITEMS Runtime Development Tools)
    run(ignored ${CMAKE_COMMAND} --install ${build} --component ${component})
  endforeach()
  file(RENAME ${prefix} ${WORK}/${folder})
endfunction()

build_with()
check_uninstall(${build} "${prefix}")
install_to(moved)
# The same tree again: the static library's objects are the same, the rest is another package.
build_with(-DMHA_BUILD_SHARED=OFF -DMHA_BUILD_CLI=OFF)
install_to(static-build)

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
  foreach(folder IN ITEMS ${WORK} ${SOURCE} ./src) # the last is how the preset spells the source
    string(HEX "${folder}/" needle)
    string(FIND "${content}" "${needle}" position)
    if(NOT position EQUAL -1)
      fail("${name} contains the path ${folder}")
    endif()
  endforeach()
endforeach()
file(GLOB_RECURSE others RELATIVE ${WORK}/static-build LIST_DIRECTORIES FALSE
     ${WORK}/static-build/*)
if("${others}" MATCHES "libmha[.]so|shared|bin/mha")
  fail("Built without the shared library and the command, there is: ${others}")
endif()

file(COPY ${WORK}/moved/ DESTINATION ${WORK}/static-only)
file(GLOB_RECURSE shared ${WORK}/static-only/libmha.so* ${WORK}/static-only/mha-shared-targets*)
file(REMOVE ${shared} ${WORK}/static-only/bin/mha)
