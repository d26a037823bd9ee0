# Finds a CBLAS with 32-bit integers and makes the target mha::cblas for it.
#
#   MHA_BLAS              auto (default), OpenBLAS, BLIS or Generic
#   MHA_BLAS_LIBRARIES    the libraries to link, and
#   MHA_BLAS_INCLUDE_DIR  the folder of cblas.h; given together they are taken as they are
#
# Sets MhaCBLAS_FOUND, MhaCBLAS_VENDOR (empty for libraries that were given), MhaCBLAS_LIBRARIES,
# MhaCBLAS_STATIC_FLAGS (for the linker, where it takes the BLAS out of an archive) and, on failure,
# MhaCBLAS_NOT_FOUND_MESSAGE. Used by the build, and installed for those who link the static
# library.
#
# CMake's own FindBLAS is left alone: it asks for Fortran's sgemm_, knows no header, listens to the
# environment, and would share the target BLAS::BLAS with whoever else looks for a BLAS.
# The header alone proves the size of the integer, since the libraries for 32 and 64 bits export
# the same names; nothing is run, so that cross compiling works.
cmake_policy(VERSION 3.25)

if(NOT DEFINED MHA_BLAS)
  set(MHA_BLAS "auto" CACHE STRING "The BLAS to use: auto, OpenBLAS, BLIS or Generic")
  set_property(CACHE MHA_BLAS PROPERTY STRINGS auto OpenBLAS BLIS Generic)
endif()
if(NOT DEFINED MHA_BLAS_LIBRARIES)
  set(MHA_BLAS_LIBRARIES "" CACHE STRING "Libraries of a CBLAS to be taken as they are")
endif()
if(NOT DEFINED MHA_BLAS_INCLUDE_DIR)
  set(MHA_BLAS_INCLUDE_DIR "" CACHE PATH "Folder of cblas.h that goes with MHA_BLAS_LIBRARIES")
endif()

# Compiles `body` as the main function of a program in C11 without extensions and with the caller's
# `definitions`, and links it if there are libraries; `result` is TRUE or FALSE. A header of the
# system comes first, as it will in libmha: it decides what later ones see of POSIX.
function(mha_blas_try result header_dir libraries body)
  set(source "#include <stdint.h>\n#include <cblas.h>\nint main(void)\n{\n${body}\n}\n")
  if(NOT libraries)
    set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  endif()
  unset(MHA_BLAS_PROBE CACHE)
  try_compile(
    MHA_BLAS_PROBE SOURCE_FROM_VAR probe.c source
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${header_dir}"
    COMPILE_DEFINITIONS -Werror=incompatible-pointer-types -Werror=implicit-function-declaration
                        ${definitions}
    LINK_LIBRARIES ${libraries} C_STANDARD 11 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
  set(${result} ${MHA_BLAS_PROBE} PARENT_SCOPE)
  unset(MHA_BLAS_PROBE CACHE)
endfunction()

# Proves that `libraries` with the cblas.h in `header_dir` have what libmha calls. `fault` receives
# an empty string or a clause that tells what is wrong with them. Sets `definitions` in the caller:
# options without which the header does not compile.
function(mha_blas_fault fault header_dir libraries)
  # The suffix is in the file's own name; libopenblas.so may be a link to another flavour.
  foreach(library IN LISTS libraries)
    file(REAL_PATH "${library}" file)
    get_filename_component(name "${file}" NAME)
    if(name MATCHES "(blas|blis)[a-z]*_?64|ilp64")
      set(${fault} "${library} (${name}) is built with 64-bit integers" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  # Without this the compiler would take any cblas.h that it finds by itself.
  if(NOT EXISTS "${header_dir}/cblas.h")
    set(${fault} "there is no cblas.h in ${header_dir}" PARENT_SCOPE)
    return()
  endif()
  set(declares "return (int)sizeof(enum CBLAS_ORDER) + (int)sizeof(&cblas_sgemm) == 0;")
  set(definitions "")
  mha_blas_try(has_header "${header_dir}" "" "${declares}")
  if(NOT has_header) # that of BLIS wants types of POSIX, which C11 alone does not have
    set(definitions -D_POSIX_C_SOURCE=200809L)
    mha_blas_try(has_header "${header_dir}" "" "${declares}")
  endif()
  set(definitions "${definitions}" PARENT_SCOPE)
  if(NOT has_header)
    set(${fault} "cblas.h in ${header_dir} does not compile or does not declare cblas_sgemm"
        PARENT_SCOPE)
    return()
  endif()
  # volatile, so that no optimisation leaves the function out of what is linked.
  set(product
      "  void (*volatile product)(enum CBLAS_ORDER, enum CBLAS_TRANSPOSE, enum CBLAS_TRANSPOSE,
                  int, int, int, float, const float *, int, const float *, int, float, float *, int)
    = cblas_sgemm;\n  return product == 0;")
  mha_blas_try(has_int "${header_dir}" "" "${product}")
  if(NOT has_int)
    set(${fault} "cblas.h in ${header_dir} declares cblas_sgemm with 64-bit integers" PARENT_SCOPE)
    return()
  endif()
  mha_blas_try(links "${header_dir}" "${libraries}" "${product}")
  if(NOT links)
    list(JOIN libraries " " text)
    set(${fault} "${text} cannot be linked or does not contain cblas_sgemm" PARENT_SCOPE)
    return()
  endif()
  set(${fault} "" PARENT_SCOPE)
endfunction()

# ---- archives ----
# Vendors' own functions are weak references in libmha, which take nothing out of an archive: the
# linker has to be told their names, and only those that are there.
set(mha_openblas_functions openblas_get_parallel openblas_get_config openblas_get_corename
                           openblas_get_num_threads openblas_set_num_threads)
set(mha_blis_functions bli_info_get_version_str bli_info_get_enable_threading bli_arch_query_id
                       bli_arch_string bli_thread_get_num_threads bli_thread_set_num_threads)

# Whether the linker was told to take archives only.
function(mha_blas_links_statically answer)
  set(${answer} FALSE PARENT_SCOPE)
  if("${CMAKE_C_FLAGS} ${CMAKE_EXE_LINKER_FLAGS} " MATCHES "(^| )-static(-pie)? ")
    set(${answer} TRUE PARENT_SCOPE)
  endif()
endfunction()

# Sets `flags` to what brings the vendor's functions out of `libraries`, if they have some, and
# `has_archive` to whether one of them is an archive, as far as that can be told.
function(mha_blas_look_into flags has_archive header_dir libraries)
  mha_blas_links_statically(found)
  foreach(library IN LISTS libraries)
    file(REAL_PATH "${library}" file)
    if(file MATCHES "\\.a$")
      set(found TRUE)
    endif()
  endforeach()
  set(${has_archive} ${found} PARENT_SCOPE)
  set(${flags} "" PARENT_SCOPE)
  # Other libraries may be another vendor's when the program runs.
  if(APPLE OR WIN32 OR NOT (found OR "${libraries}" MATCHES "openblas|blis"))
    return()
  endif()
  foreach(vendor IN ITEMS openblas blis)
    set(body "")
    # Under names of the probe's own, since cblas.h may declare them.
    foreach(name IN LISTS mha_${vendor}_functions)
      string(APPEND body "  extern void probe_${name}(void) __asm__(\"${name}\");\n"
                         "  void (*volatile at_${name})(void) = probe_${name};\n"
                         "  if (!at_${name})\n    return 1;\n")
    endforeach()
    mha_blas_try(has_functions "${header_dir}" "${libraries}" "${body}  return 0;")
    if(has_functions)
      list(JOIN mha_${vendor}_functions ",-u," names)
      set(${flags} "-Wl,-u,${names}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# ---- the search ----

# Looks for one vendor's files in the usual places. A variable that comes back empty was not found.
function(mha_blas_locate vendor libraries header_dir)
  mha_blas_links_statically(only_archives)
  if(only_archives)
    set(CMAKE_FIND_LIBRARY_SUFFIXES ${CMAKE_STATIC_LIBRARY_SUFFIX})
  endif()
  if(vendor STREQUAL "OpenBLAS")
    set(names openblas)
    set(suffixes openblas openblas-pthread)
  elseif(vendor STREQUAL "BLIS")
    set(names blis)
    set(suffixes blis)
  else()
    # Where CBLAS is a library of its own it needs the BLAS behind it.
    set(names blas)
    set(suffixes cblas)
    find_library(library NAMES cblas NO_CACHE)
    if(library)
      list(APPEND found "${library}")
    endif()
    unset(library)
  endif()
  find_library(library NAMES ${names} NO_CACHE)
  if(library)
    list(APPEND found "${library}")
  else()
    set(found)
  endif()
  # First beside the library, so that a prefix of one's own brings its own header.
  get_filename_component(beside "${library}" DIRECTORY)
  find_path(header cblas.h HINTS "${beside}/../include" NO_CACHE)
  find_path(header cblas.h HINTS "${beside}/../include" PATH_SUFFIXES ${suffixes} NO_CACHE)
  if(NOT header)
    set(header "")
  endif()
  set(${libraries} "${found}" PARENT_SCOPE)
  set(${header_dir} "${header}" PARENT_SCOPE)
endfunction()

# Sets vendor, libraries, header_dir and definitions in the caller, or `fault` if nothing fits.
function(mha_blas_choose)
  set(fault "")
  if(MHA_BLAS STREQUAL "auto")
    set(candidates OpenBLAS BLIS Generic)
  elseif(MHA_BLAS MATCHES "^(OpenBLAS|BLIS|Generic)$")
    set(candidates ${MHA_BLAS})
  else()
    set(candidates)
    set(fault "MHA_BLAS is ${MHA_BLAS}, which is none of auto, OpenBLAS, BLIS and Generic")
  endif()
  set(chosen)
  if(candidates AND MHA_BLAS_LIBRARIES AND MHA_BLAS_INCLUDE_DIR)
    set(libraries "${MHA_BLAS_LIBRARIES}")
    set(header_dir "${MHA_BLAS_INCLUDE_DIR}")
    mha_blas_fault(fault "${header_dir}" "${libraries}")
    set(candidates)
    set(chosen "")
  elseif(candidates AND (MHA_BLAS_LIBRARIES OR MHA_BLAS_INCLUDE_DIR))
    set(candidates)
    set(fault "of MHA_BLAS_LIBRARIES and MHA_BLAS_INCLUDE_DIR only one is given")
  endif()
  foreach(candidate IN LISTS candidates)
    mha_blas_locate(${candidate} libraries header_dir)
    if(NOT libraries)
      string(APPEND faults ", no ${candidate} library")
    elseif(NOT header_dir)
      string(APPEND faults ", no cblas.h for ${libraries}")
    else()
      mha_blas_fault(fault "${header_dir}" "${libraries}")
      if(NOT fault)
        set(chosen ${candidate})
        break()
      endif()
      string(APPEND faults ", ${fault}")
    endif()
  endforeach()
  if(candidates AND NOT chosen)
    string(REGEX REPLACE "^, " "" fault "${faults}")
  endif()
  set(vendor "${chosen}" PARENT_SCOPE)
  set(libraries "${libraries}" PARENT_SCOPE)
  set(header_dir "${header_dir}" PARENT_SCOPE)
  set(definitions "${definitions}" PARENT_SCOPE)
  set(fault "${fault}" PARENT_SCOPE)
endfunction()

# What to tell those who have no CBLAS that fits.
function(mha_blas_sentence sentence fault)
  set(package libopenblas-dev)
  if(MHA_BLAS STREQUAL "BLIS")
    set(package libblis-dev)
  elseif(MHA_BLAS STREQUAL "Generic")
    set(package libblas-dev)
  endif()
  string(CONCAT text "libmha needs a CBLAS with 32-bit integers, but: ${fault}; install one (on "
                     "Debian: apt-get install ${package}) or set both MHA_BLAS_LIBRARIES and "
                     "MHA_BLAS_INCLUDE_DIR.")
  set(${sentence} "${text}" PARENT_SCOPE)
endfunction()

# Sets MhaCBLAS_FOUND, MhaCBLAS_VENDOR, MhaCBLAS_LIBRARIES, MhaCBLAS_STATIC_FLAGS,
# MhaCBLAS_NOT_FOUND_MESSAGE.
function(mha_blas_find)
  mha_blas_choose()
  set(MhaCBLAS_FOUND TRUE)
  if(fault)
    set(MhaCBLAS_FOUND FALSE)
    mha_blas_sentence(MhaCBLAS_NOT_FOUND_MESSAGE "${fault}")
  else()
    mha_blas_look_into(MhaCBLAS_STATIC_FLAGS has_archive "${header_dir}" "${libraries}")
    # Among the libraries, since options do not pass through a static library under older policies.
    set(items ${libraries})
    if(has_archive)
      list(PREPEND items ${MhaCBLAS_STATIC_FLAGS})
    endif()
    add_library(mha::cblas INTERFACE IMPORTED)
    set_target_properties(
      mha::cblas PROPERTIES INTERFACE_LINK_LIBRARIES "${items}"
                            INTERFACE_INCLUDE_DIRECTORIES "${header_dir}"
                            INTERFACE_COMPILE_OPTIONS "${definitions}")
    list(JOIN libraries " " text)
    set(told "CBLAS: ${text} with cblas.h in ${header_dir}")
  endif()
  if(MhaCBLAS_FOUND AND NOT MhaCBLAS_FIND_QUIETLY)
    message(STATUS "${told}")
  elseif(NOT MhaCBLAS_FOUND AND MhaCBLAS_FIND_REQUIRED)
    message(FATAL_ERROR "${MhaCBLAS_NOT_FOUND_MESSAGE}")
  endif()
  set(MhaCBLAS_VENDOR "${vendor}")
  set(MhaCBLAS_LIBRARIES "${libraries}")
  return(PROPAGATE MhaCBLAS_FOUND MhaCBLAS_VENDOR MhaCBLAS_LIBRARIES MhaCBLAS_STATIC_FLAGS
                   MhaCBLAS_NOT_FOUND_MESSAGE)
endfunction()

if(TARGET mha::cblas)
  set(MhaCBLAS_FOUND TRUE)
else()
  mha_blas_find()
endif()
