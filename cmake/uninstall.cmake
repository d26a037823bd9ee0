# Removes what the installations from the build folder BUILD put in place: the files that its
# manifests name, then those folders of the package's own that are empty. DESTDIR counts as it did.
cmake_policy(VERSION 3.25)

file(GLOB manifests ${BUILD}/install_manifest.txt ${BUILD}/install_manifest_*.txt)
if(NOT manifests)
  message(FATAL_ERROR
          "There is no install_manifest*.txt in ${BUILD}: nothing was installed from it.")
endif()

set(folders)
foreach(manifest IN LISTS manifests)
  file(STRINGS ${manifest} files ENCODING UTF-8)
  foreach(file IN LISTS files)
    set(file "$ENV{DESTDIR}${file}")
    get_filename_component(folder "${file}" DIRECTORY)
    list(APPEND folders "${folder}")
    if(EXISTS "${file}" OR IS_SYMLINK "${file}")
      message(STATUS "Removing ${file}")
      file(REMOVE "${file}")
    else()
      message(STATUS "Not there: ${file}")
    endif()
  endforeach()
endforeach()

# Other folders, such as lib, may be somebody else's even when they are empty.
list(REMOVE_DUPLICATES folders)
foreach(folder IN LISTS folders)
  get_filename_component(name "${folder}" NAME)
  file(GLOB rest "${folder}/*" "${folder}/.*")
  if(name STREQUAL "mha" AND NOT rest AND EXISTS "${folder}")
    message(STATUS "Removing ${folder}")
    file(REMOVE_RECURSE "${folder}")
  endif()
endforeach()
file(REMOVE ${manifests})
