# The Debian packages of the preset deb, in the build tree that install.cmake left: which files are
# in which, and nothing that lintian has to say against them.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

find_program(lintian lintian)
find_program(dpkg_deb dpkg-deb)
find_program(shlibdeps dpkg-shlibdeps)
if(NOT lintian OR NOT dpkg_deb OR NOT shlibdeps)
  message("SKIPPED: lintian and dpkg-dev are not installed")
  return()
endif()

# Without its cache the tree is configured as a new one, while the objects stay.
set(build ${WORK}/build)
set(WORK ${WORK}/deb)
file(REMOVE_RECURSE ${WORK})
forget(${build})
run(ignored ${CMAKE_COMMAND} -S ${SOURCE} --preset deb -B ${build} -G ${GENERATOR} -DMHA_MPI=OFF
    -DCMAKE_C_COMPILER=${C_COMPILER} "-DCMAKE_C_FLAGS_RELEASE=${FAST_FLAGS}")
run(ignored ${CMAKE_COMMAND} --build ${build} --parallel 2)
run(ignored ${CMAKE_CPACK_COMMAND} --config ${build}/CPackConfig.cmake -B ${WORK})
file(GLOB packages ${WORK}/*.deb)

# expect(<package> <pattern>...): every file of it is as one of the patterns, each of which is met.
function(expect package)
  file(GLOB file ${WORK}/${package}_${VERSION}-*.deb)
  run(text ${dpkg_deb} --contents ${file})
  string(REGEX MATCHALL "[^\n]+\n" lines "${text}")
  set(patterns "${ARGN}" "[.]/usr/share/doc/${package}/(changelog|changelog[.]Debian)[.]gz"
               "[.]/usr/share/doc/${package}/copyright")
  set(met)
  foreach(line IN LISTS lines)
    if(line MATCHES "/\n$")
      if(NOT line MATCHES "^drwxr-xr-x root/root")
        fail("${package}: ${line}")
      endif()
      continue()
    endif()
    set(known FALSE)
    foreach(pattern IN LISTS patterns)
      if(line MATCHES " ${pattern}( -> [^\n]*)?\n$")
        list(APPEND met "${pattern}")
        set(known TRUE)
      endif()
    endforeach()
    if(NOT known)
      fail("${package} holds ${line}")
    endif()
  endforeach()
  list(REMOVE_ITEM patterns ${met})
  if(patterns)
    fail("${package} lacks ${patterns}:\n${text}")
  endif()
endfunction()

run(triplet ${C_COMPILER} -print-multiarch)
string(STRIP "${triplet}" triplet)
set(libdir "[.]/usr/lib/${triplet}")
expect(libmha${ABI} "${libdir}/libmha[.]so[.]${ABI}" "${libdir}/libmha[.]so[.]${VERSION}")
expect(libmha-dev "[.]/usr/include/mha[.]h" "${libdir}/libmha[.](a|so)"
       "${libdir}/pkgconfig/mha[.]pc" "${libdir}/cmake/mha/[A-Za-z-]+[.]cmake")
expect(mha-tools "[.]/usr/bin/mha" "[.]/usr/share/man/man1/mha[.]1[.]gz")

# The linker's cache is renewed by dpkg's trigger, not by scripts; others find the library's package
# by its symbols.
file(GLOB library ${WORK}/libmha${ABI}_*.deb)
run(control ${dpkg_deb} --info ${library})
foreach(name IN ITEMS md5sums shlibs symbols triggers)
  if(NOT control MATCHES " ${name} *\n")
    fail("libmha${ABI} has no control file ${name}:\n${control}")
  endif()
endforeach()
if(control MATCHES "postinst|postrm")
  fail("libmha${ABI} has scripts:\n${control}")
endif()

list(LENGTH packages n)
if(NOT n EQUAL 3)
  fail("There are ${n} packages: ${packages}")
endif()

run(said ${lintian} --fail-on error,warning --allow-root ${packages})
message("${said}")
