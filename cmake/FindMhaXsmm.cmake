# Finds the generator of libxsmm, of which the engine MHA_ENGINE_XSMM is made, and makes the target
# mha::xsmm.
#
#   MHA_XSMM_LIBRARY      its library (xsmmgen, or a libxsmm that has the generator in it), and
#   MHA_XSMM_INCLUDE_DIR  the folder of libxsmm_generator.h; what is not given is looked for
#
# Sets MhaXsmm_FOUND, MhaXsmm_LIBRARIES and, on failure, MhaXsmm_NOT_FOUND_MESSAGE. Used by the
# build, and installed for those who link a static library that has the engine.
cmake_policy(VERSION 3.25)

# `fault` receives an empty string or a clause that tells what is wrong.
function(mha_xsmm_fault fault library header_dir)
  set(text "")
  if(NOT library)
    set(text "there is no library xsmmgen")
  elseif(NOT header_dir OR NOT EXISTS "${header_dir}/libxsmm_generator.h")
    set(text "there is no libxsmm_generator.h")
  else()
    file(STRINGS "${header_dir}/libxsmm_generator.h" line
         REGEX "libxsmm_sgemm_descriptor_init *\\(")
    if(NOT line) # libxsmm 2 has other functions
      set(text "libxsmm_generator.h in ${header_dir} is not that of libxsmm 1.17")
    endif()
  endif()
  set(${fault} "${text}" PARENT_SCOPE)
endfunction()

function(mha_xsmm_find)
  # An archive, even where there is a shared library: the engine is then no run-time dependency.
  set(CMAKE_FIND_LIBRARY_SUFFIXES ${CMAKE_STATIC_LIBRARY_SUFFIX} ${CMAKE_FIND_LIBRARY_SUFFIXES})
  find_library(MHA_XSMM_LIBRARY NAMES xsmmgen)
  get_filename_component(beside "${MHA_XSMM_LIBRARY}" DIRECTORY)
  find_path(MHA_XSMM_INCLUDE_DIR libxsmm_generator.h HINTS "${beside}/../include")
  mark_as_advanced(MHA_XSMM_LIBRARY MHA_XSMM_INCLUDE_DIR)
  mha_xsmm_fault(fault "${MHA_XSMM_LIBRARY}" "${MHA_XSMM_INCLUDE_DIR}")
  if(fault)
    set(MhaXsmm_FOUND FALSE)
    string(CONCAT MhaXsmm_NOT_FOUND_MESSAGE
           "MHA_ENGINE_XSMM needs libxsmm 1.17, but: ${fault}; install it (on Debian: apt-get "
           "install libxsmm-dev), set MHA_XSMM_LIBRARY and MHA_XSMM_INCLUDE_DIR, or build libmha "
           "with MHA_XSMM=OFF.")
    if(MhaXsmm_FIND_REQUIRED)
      message(FATAL_ERROR "${MhaXsmm_NOT_FOUND_MESSAGE}")
    endif()
  else()
    set(MhaXsmm_FOUND TRUE)
    set(MhaXsmm_LIBRARIES "${MHA_XSMM_LIBRARY}")
    add_library(mha::xsmm INTERFACE IMPORTED)
    set_target_properties(
      mha::xsmm PROPERTIES INTERFACE_LINK_LIBRARIES "${MHA_XSMM_LIBRARY}"
                           INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${MHA_XSMM_INCLUDE_DIR}")
    if(NOT MhaXsmm_FIND_QUIETLY)
      message(STATUS "libxsmm: ${MHA_XSMM_LIBRARY}")
    endif()
  endif()
  return(PROPAGATE MhaXsmm_FOUND MhaXsmm_LIBRARIES MhaXsmm_NOT_FOUND_MESSAGE)
endfunction()

if(TARGET mha::xsmm)
  set(MhaXsmm_FOUND TRUE)
else()
  mha_xsmm_find()
endif()
