# A BLAS in an archive is recognised like one in a shared library, however the linker takes it: in
# libmha.so, under libmha.a, in a program without shared libraries, and by hand: OpenBLAS as far as
# it is installed where Debian puts it, or every flavour of OpenBLAS and BLIS below ROOT.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

run(triplet ${C_COMPILER} -print-multiarch)
string(STRIP "${triplet}" triplet)
file(GLOB archives ${ROOT}/usr/lib/${triplet}/openblas-*/libopenblas.a)
if(ROOT)
  file(GLOB others ${ROOT}/usr/lib/${triplet}/blis-*/libblis.a)
  list(APPEND archives ${others})
endif()
if(NOT archives)
  message("SKIPPED: no libopenblas.a is installed")
  return()
endif()
file(REMOVE_RECURSE ${WORK})
set(build ${WORK}/build)
set(ENV{OPENBLAS_NUM_THREADS} 1)
set(ENV{BLIS_NUM_THREADS} 1)
set(ENV{OMP_NUM_THREADS} 1)

# What `mha --version` has to say of a flavour.
set(openblas-pthread "blas: OpenBLAS [0-9].*blas_threading: its own pool")
set(openblas-openmp "blas: OpenBLAS [0-9].*blas_threading: OpenMP")
set(openblas-serial "blas: OpenBLAS [0-9].*blas_threading: serial, every product under one lock")
set(blis-pthread "blas: BLIS [0-9].*blas_threading: its own pool")
set(blis-openmp "blas: BLIS [0-9].*blas_threading: its own pool")
set(blis-serial "blas: BLIS [0-9].*blas_threading: none")

# expect(<pattern> <program>)
function(expect pattern program)
  run(text ${program} --version)
  if(NOT text MATCHES "${pattern}" OR NOT text MATCHES "blas_threads: 1\n"
     OR text MATCHES "blas_core: unknown")
    fail("${case}: \"${pattern}\" is not in\n${text}")
  endif()
endfunction()

# build_with(<options of cmake>): the command and what it needs. What is compiled for one flavour
# serves all: only the linker's work is done again.
function(build_with)
  run(text ${CMAKE_COMMAND} -S ${SOURCE} -B ${build} -G ${GENERATOR}
      -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_C_FLAGS=-DMHA_BASELINE -DCMAKE_BUILD_TYPE=None
      -DMHA_BUILD_TESTS=OFF -DMHA_BUILD_BENCH=OFF "-DMHA_BLAS_LIBRARIES=${libraries}"
      -DMHA_BLAS_INCLUDE_DIR=${headers} -UMHA_JANSSON_LIBRARY
      -DCMAKE_POSITION_INDEPENDENT_CODE=ON
      -DCMAKE_INSTALL_PREFIX=${WORK}/prefix ${ARGN})
  run(text ${CMAKE_COMMAND} --build ${build} --parallel 2)
endfunction()

# Compiled by hand with what mha.pc says of static linking, or with the mere names of the libraries.
function(expect_by_hand pattern)
  set(ENV{PKG_CONFIG_PATH} "")
  file(GLOB_RECURSE pc ${WORK}/prefix/*/mha.pc)
  get_filename_component(pc_dir ${pc} DIRECTORY)
  set(ENV{PKG_CONFIG_LIBDIR} ${pc_dir})
  run(flags ${PKG_CONFIG} --static --cflags --libs mha)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  file(WRITE ${WORK}/user.c "#include <mha.h>\n#include <stdio.h>
int main(void)
{
  char text[1024];
  mha_build_info(text, sizeof text);
  return puts(text) < 0;
}\n")
  set(compile ${C_COMPILER} -std=c11 ${WORK}/user.c -o ${WORK}/user)
  run(text ${compile} -static ${flags} -lm)
  expect("${pattern}" ${WORK}/user)
  # Without the names the version is not to be had, but the lock is.
  list(FILTER flags EXCLUDE REGEX "-Wl,-u")
  string(REGEX REPLACE "\\[0-9\\].*blas" "?\n.*blas" pattern "${pattern}")
  run(text ${compile} -static ${flags} -lm)
  run(text ${WORK}/user)
  if(NOT text MATCHES "${pattern}" AND NOT pattern MATCHES "OpenMP|none")
    fail("${case}: without the names \"${pattern}\" is not in\n${text}")
  endif()
endfunction()

foreach(archive IN LISTS archives)
  get_filename_component(flavour ${archive} DIRECTORY)
  get_filename_component(flavour ${flavour} NAME)
  if(NOT headers) # one for all, so that nothing is compiled again
    set(headers ${ROOT}/usr/include/${triplet}/${flavour})
  endif()
  # An archive does not say what it needs itself.
  set(libraries "${archive}\\;m\\;pthread")
  if(flavour MATCHES "openmp")
    string(APPEND libraries "\\;gomp")
  endif()
  message("${flavour}: ${archive}")
  set(case "${flavour} in libmha.so")
  build_with(-DMHA_BUILD_SHARED=ON -DCMAKE_EXE_LINKER_FLAGS=)
  expect("${${flavour}}" ${build}/mha)
  foreach(flags IN ITEMS "" -static -static-pie)
    set(case "${flavour} under libmha.a ${flags}")
    build_with(-DMHA_BUILD_SHARED=OFF -DCMAKE_EXE_LINKER_FLAGS=${flags})
    expect("${${flavour}}" ${build}/mha)
  endforeach()
  run(text ${CMAKE_COMMAND} --install ${build})
  set(case "${flavour} by hand")
  expect_by_hand("${${flavour}}")
endforeach()
