# Finds jansson, which parses the JSON of safetensors files, and makes the target mha::jansson.
#
#   MHA_JANSSON_LIBRARY      its library, and
#   MHA_JANSSON_INCLUDE_DIR  the folder of jansson.h; what is not given is looked for
#
# Sets MhaJansson_FOUND, MhaJansson_LIBRARIES and, on failure, MhaJansson_NOT_FOUND_MESSAGE. Used by
# the build, and installed for those who link the static library. It needs no pkg-config, so that
# they need none either.
cmake_policy(VERSION 3.25)

# `fault` receives an empty string or a clause that tells what is wrong.
function(mha_jansson_fault fault library header_dir)
  if(NOT library)
    set(text "there is no library jansson")
  elseif(NOT header_dir OR NOT EXISTS "${header_dir}/jansson.h")
    set(text "there is no jansson.h")
    if(header_dir)
      string(APPEND text " in ${header_dir}")
    endif()
  else()
    file(STRINGS "${header_dir}/jansson.h" line REGEX "^#define JANSSON_VERSION +\"")
    string(REGEX MATCH "[0-9]+(\\.[0-9]+)+" version "${line}")
    set(text "")
    if(NOT version OR version VERSION_LESS 2.11)
      set(text "jansson.h in ${header_dir} says version \"${version}\"")
    endif()
  endif()
  set(${fault} "${text}" PARENT_SCOPE)
endfunction()

function(mha_jansson_find)
  if("${CMAKE_C_FLAGS} ${CMAKE_EXE_LINKER_FLAGS} " MATCHES "(^| )-static(-pie)? ")
    set(CMAKE_FIND_LIBRARY_SUFFIXES ${CMAKE_STATIC_LIBRARY_SUFFIX})
  endif()
  find_library(MHA_JANSSON_LIBRARY NAMES jansson)
  # First beside the library, so that a prefix of one's own brings its own header.
  get_filename_component(beside "${MHA_JANSSON_LIBRARY}" DIRECTORY)
  find_path(MHA_JANSSON_INCLUDE_DIR jansson.h HINTS "${beside}/../include")
  mark_as_advanced(MHA_JANSSON_LIBRARY MHA_JANSSON_INCLUDE_DIR)
  mha_jansson_fault(fault "${MHA_JANSSON_LIBRARY}" "${MHA_JANSSON_INCLUDE_DIR}")
  if(fault)
    set(MhaJansson_FOUND FALSE)
    string(CONCAT MhaJansson_NOT_FOUND_MESSAGE
           "libmha needs jansson 2.11 or later, but: ${fault}; install it (on Debian: apt-get "
           "install libjansson-dev) or set MHA_JANSSON_LIBRARY and MHA_JANSSON_INCLUDE_DIR.")
    if(MhaJansson_FIND_REQUIRED)
      message(FATAL_ERROR "${MhaJansson_NOT_FOUND_MESSAGE}")
    endif()
  else()
    set(MhaJansson_FOUND TRUE)
    set(MhaJansson_LIBRARIES "${MHA_JANSSON_LIBRARY}")
    add_library(mha::jansson INTERFACE IMPORTED)
    set_target_properties(
      mha::jansson PROPERTIES INTERFACE_LINK_LIBRARIES "${MHA_JANSSON_LIBRARY}"
                              INTERFACE_INCLUDE_DIRECTORIES "${MHA_JANSSON_INCLUDE_DIR}")
    if(NOT MhaJansson_FIND_QUIETLY)
      message(STATUS "jansson: ${MHA_JANSSON_LIBRARY}")
    endif()
  endif()
  return(PROPAGATE MhaJansson_FOUND MhaJansson_LIBRARIES MhaJansson_NOT_FOUND_MESSAGE)
endfunction()

if(TARGET mha::jansson)
  set(MhaJansson_FOUND TRUE)
else()
  mha_jansson_find()
endif()
