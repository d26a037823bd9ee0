# Where things are installed and what they are called is the installer's choice: folders beside and
# outside the prefix, spaces, postfixes, DESTDIR, generators of several configurations. Each time
# the command runs, and pkg-config and find_package lead to a program that computes.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

file(REMOVE_RECURSE ${WORK})
set(build ${WORK}/build)
set(ENV{CMAKE_PREFIX_PATH} "")
set(ENV{PKG_CONFIG_PATH} "")
# No optimisation, and only the linker's work is done again for each case.
set(configure ${CMAKE_COMMAND} -S ${SOURCE} -DCMAKE_C_COMPILER=${C_COMPILER} -DMHA_BUILD_TESTS=OFF
              -DMHA_BUILD_BENCH=OFF -DCMAKE_C_FLAGS=-DMHA_BASELINE -DCMAKE_C_FLAGS_DEBUG=
              "-DMHA_BLAS_LIBRARIES=${BLAS_LIBRARIES}" -DMHA_BLAS_INCLUDE_DIR=${BLAS_INCLUDE_DIR})

# install_with(<prefix> <options>...)
function(install_with prefix)
  run(ignored ${configure} -B ${build} -G ${GENERATOR} -DCMAKE_BUILD_TYPE=Debug
      "-DCMAKE_INSTALL_PREFIX=${prefix}" ${ARGN})
  run(ignored ${CMAKE_COMMAND} --build ${build} --parallel 2)
  run(ignored ${CMAKE_COMMAND} --install ${build})
endfunction()

# expect_use(<folder of the library> <prefix> <targets>...)
function(expect_use library_dir prefix)
  run(ignored ${CMAKE_COMMAND} -E env --unset=LD_LIBRARY_PATH "${prefix}/bin/mha" demo)

  set(ENV{PKG_CONFIG_LIBDIR} "${library_dir}/pkgconfig")
  foreach(options IN ITEMS "" ${define_prefix} "--static")
    run(flags ${PKG_CONFIG} ${options} --cflags --libs mha)
    separate_arguments(flags UNIX_COMMAND "${flags}")
    run(ignored ${C_COMPILER} -std=c11 ${CONSUMER}/consumer.c -o ${WORK}/consumer ${flags} -lm)
    run(numbers ${CMAKE_COMMAND} -E env "LD_LIBRARY_PATH=${library_dir}" ${WORK}/consumer)
    expect_numbers("${numbers}")
  endforeach()
  unset(ENV{PKG_CONFIG_LIBDIR})

  foreach(target IN LISTS ARGN)
    string(REGEX MATCH "static" component ${target})
    forget(${WORK}/consume)
    file(REMOVE ${WORK}/consume/consumer)
    run(ignored ${CMAKE_COMMAND} -S ${CONSUMER} -B ${WORK}/consume -G ${GENERATOR}
        -DCMAKE_C_COMPILER=${C_COMPILER} -DCONSUMER_LANGUAGES=C -DCONSUMER_TARGET=${target}
        -DCONSUMER_COMPONENTS=${component} "-Dmha_DIR=${library_dir}/cmake/mha"
        "-DMHA_BLAS_LIBRARIES=${BLAS_LIBRARIES}" -DMHA_BLAS_INCLUDE_DIR=${BLAS_INCLUDE_DIR})
    run(ignored ${CMAKE_COMMAND} --build ${WORK}/consume)
    run(numbers ${WORK}/consume/consumer)
    expect_numbers("${numbers}")
  endforeach()
endfunction()

message("A library folder and a prefix of other names, moved")
set(prefix "${WORK}/a prefix")
install_with("${prefix}" -DCMAKE_INSTALL_LIBDIR=lib64)
file(RENAME "${prefix}" "${WORK}/another prefix")
set(define_prefix --define-prefix)
expect_use("${WORK}/another prefix/lib64" "${WORK}/another prefix" mha::mha mha::mha_static)
set(define_prefix)

# The static library asks for libm by its name, not where it was found.
file(STRINGS "${WORK}/another prefix/lib64/cmake/mha/mha-static-targets.cmake" paths REGEX "/libm\\.")
if(paths)
  fail("The package knows where libm was: ${paths}")
endif()

message("Staged, and with the prefix told when installing")
set(ENV{DESTDIR} ${WORK}/stage)
run(ignored ${CMAKE_COMMAND} --install ${build} --prefix /opt/mha)
unset(ENV{DESTDIR})
expect_use(${WORK}/stage/opt/mha/lib64 ${WORK}/stage/opt/mha mha::mha)

message("Absolute folders inside the prefix, moved")
set(prefix ${WORK}/inside)
install_with(${prefix} -DCMAKE_INSTALL_LIBDIR=${prefix}/lib/deep
             -DCMAKE_INSTALL_INCLUDEDIR=${prefix}/include)
file(RENAME ${prefix} ${WORK}/moved)
expect_use(${WORK}/moved/lib/deep ${WORK}/moved mha::mha)

message("Absolute folders outside the prefix, and a postfix")
run(temporary mktemp -d) # CMake exports no absolute folder of headers inside the source tree
string(STRIP "${temporary}" temporary)
set(outside "${temporary}/out side")
install_with("${WORK}/a prefix" "-DCMAKE_INSTALL_LIBDIR=${outside}/lib"
             "-DCMAKE_INSTALL_INCLUDEDIR=${outside}/dev" -DCMAKE_DEBUG_POSTFIX=-debug)
if(NOT EXISTS "${outside}/lib/libmha-debug.so")
  fail("The library has no postfix")
endif()
expect_use("${outside}/lib" "${WORK}/a prefix" mha::mha mha::mha_static)
file(REMOVE_RECURSE ${temporary})

message("Several files at once are never compiled as one")
run(ignored ${configure} -B ${WORK}/unity -G ${GENERATOR} -DCMAKE_UNITY_BUILD=ON
    -DMHA_BUILD_TESTS=ON -DMHA_BUILD_BENCH=ON -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
file(STRINGS ${WORK}/unity/compile_commands.json lines REGEX "[Uu]nity_[0-9]+_c")
if(lines)
  fail("${lines}")
endif()

message("BUILD_SHARED_LIBS")
run(ignored ${configure} -B ${WORK}/static -G ${GENERATOR} -DBUILD_SHARED_LIBS=OFF)
file(STRINGS ${WORK}/static/CMakeCache.txt lines REGEX "^MHA_BUILD_SHARED:BOOL=OFF$")
if(NOT lines)
  fail("BUILD_SHARED_LIBS=OFF still builds the shared library")
endif()

find_program(ninja ninja)
if(ninja)
  message("Two configurations in one build folder, side by side in one prefix")
  file(REMOVE_RECURSE ${build})
  run(ignored ${configure} -B ${build} -G "Ninja Multi-Config" -DCMAKE_INSTALL_LIBDIR=lib
      -DMHA_BUILD_STATIC=OFF -DCMAKE_INSTALL_PREFIX=${WORK}/multi -DCMAKE_DEBUG_POSTFIX=-debug -DCMAKE_C_FLAGS_RELEASE=)
  foreach(config IN ITEMS Debug Release)
    run(ignored ${CMAKE_COMMAND} --build ${build} --config ${config})
    run(ignored ${CMAKE_COMMAND} --install ${build} --config ${config})
    expect_use(${WORK}/multi/lib ${WORK}/multi mha::mha)
  endforeach()
endif()
