# Debian packages out of the components: libmha0, libmha-dev and mha-tools, and with MPI libmha-mpi0,
# libmha-mpi-dev and mha-mpi, with what Debian's policy wants in each. Included by install.cmake if MHA_DEBIAN is ON, as in the preset deb.
find_program(MHA_GZIP gzip REQUIRED)
mark_as_advanced(MHA_GZIP)

set(debian_dir ${PROJECT_BINARY_DIR}/debian)
set(debian_revision 0upstream1) # less than any revision of Debian's own
set(debian_version ${PROJECT_VERSION}-${debian_revision})
set(maintainer "The libmha authors <libmha@example.org>")
set(package_of_Runtime libmha${MHA_ABI})
set(package_of_Development libmha-dev)
set(package_of_Tools mha-tools)
set(package_of_MpiRuntime libmha-mpi${MHA_ABI})
set(package_of_MpiDevelopment libmha-mpi-dev)
set(package_of_MpiTools mha-mpi)
set(components Runtime Development Tools)
if(TARGET mha_mpi)
  list(APPEND components MpiRuntime MpiDevelopment MpiTools)
endif()

# ---- files that the policy wants ----

# mha_install_compressed(<file> <folder> <name> <component>): as policy wants manuals and
# changelogs.
function(mha_install_compressed file folder name component)
  set(compressed ${debian_dir}/${component}/${name}.gz)
  execute_process(COMMAND ${MHA_GZIP} -9nc ${file} OUTPUT_FILE ${compressed}
                  COMMAND_ERROR_IS_FATAL ANY)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  install(FILES ${compressed} DESTINATION ${folder} COMPONENT ${component})
endfunction()

# LICENSE as a paragraph of debian/copyright: one space before each line, a dot for an empty one.
file(READ LICENSE licence)
string(REGEX MATCH "Copyright \\(c\\) ([^\n]+)\n+(.*)\n$" ignored "${licence}")
set(holder "${CMAKE_MATCH_1}")
string(REGEX REPLACE "\n" "\n " licence " ${CMAKE_MATCH_2}")
string(REGEX REPLACE "\n \n" "\n .\n" licence "${licence}")
# Code of libxsmm in the shared library brings its licence along, as Debian's package of it has it.
set(xsmm_copyright "")
if(has_xsmm)
  set(theirs /usr/share/doc/libxsmm-dev/copyright)
  if(NOT EXISTS ${theirs})
    message(FATAL_ERROR "MHA_DEBIAN with libxsmm needs its licence, ${theirs}; or set MHA_XSMM=OFF.")
  endif()
  file(READ ${theirs} text)
  string(REGEX REPLACE "^.*\nLicense: BSD-3-Clause\n " "License: BSD-3-Clause\n " text "${text}")
  string(CONCAT xsmm_copyright "\nFiles: libxsmm/*\n"
         "Copyright: 2009-2018, Intel Corporation\n"
         "License: BSD-3-Clause\n"
         "Comment: Parts of libxsmm's generator are linked into libmha.so.\n\n${text}")
endif()
configure_file(cmake/debian/copyright.in ${debian_dir}/copyright @ONLY)
string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC) # or SOURCE_DATE_EPOCH

foreach(component IN LISTS components)
  set(package ${package_of_${component}})
  set(documents share/doc/${package})
  configure_file(cmake/debian/changelog.in ${debian_dir}/${component}/changelog @ONLY)
  mha_install_compressed(${debian_dir}/${component}/changelog ${documents} changelog.Debian
                         ${component})
  mha_install_compressed(${PROJECT_SOURCE_DIR}/CHANGELOG.md ${documents} changelog ${component})
  install(FILES ${debian_dir}/copyright DESTINATION ${documents} COMPONENT ${component})
endforeach()

mha_install_compressed(${PROJECT_SOURCE_DIR}/docs/mha.1 ${CMAKE_INSTALL_MANDIR}/man1 mha.1 Tools)
if(TARGET mha_mpi)
  mha_install_compressed(${PROJECT_SOURCE_DIR}/docs/mha-mpi.1 ${CMAKE_INSTALL_MANDIR}/man1 mha-mpi.1
                         MpiTools)
endif()

# mha_describe_library(<component> <library> <map> <development package>): each symbol with the release
# that brought it, which is the name of its node in the linker map.
function(mha_describe_library component library map development)
  file(STRINGS ${map} lines REGEX "^mha_[a-z0-9_.]+ {|^ +mha_[a-z_]+;")
  set(symbols "${library}.so.${MHA_ABI} ${package_of_${component}} #MINVER#\n")
  string(APPEND symbols "* Build-Depends-Package: ${development}\n")
  foreach(line IN LISTS lines)
    if(line MATCHES "^(mha_[a-z_]*([0-9.]+)) {")
      set(node ${CMAKE_MATCH_1})
      set(release ${CMAKE_MATCH_2}.0)
      string(APPEND symbols " ${node}@${node} ${release}\n")
    elseif(line MATCHES "(mha_[a-z_]+);")
      string(APPEND symbols " ${CMAKE_MATCH_1}@${node} ${release}\n")
    endif()
  endforeach()
  file(WRITE ${debian_dir}/${component}/symbols "${symbols}")
  file(WRITE ${debian_dir}/${component}/shlibs
       "${library} ${MHA_ABI} ${package_of_${component}} (>= ${PROJECT_VERSION})\n")
endfunction()
mha_describe_library(Runtime libmha cmake/libmha.map ${package_of_Development})
if(TARGET mha_mpi)
  mha_describe_library(MpiRuntime libmha_mpi cmake/libmha_mpi.map ${package_of_MpiDevelopment})
endif()

# ---- packages ----

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME mha)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "") # each package has its own
set(CPACK_PACKAGE_CONTACT "${maintainer}")
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL ${components})
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS
    OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_RELEASE ${debian_revision})
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_PACKAGE_SOURCE mha)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)

set(about "Computes the attention layer of transformers, every matrix product a CBLAS
call, on any number of threads, in memory that grows with the length alone.
")

set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME ${package_of_Runtime})
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION
    "multi-head attention on the CPU - shared library
${about}
This package contains the shared library.")
# CPack would write a postinst and a postrm that call ldconfig, which Debian leaves to a trigger,
# unless it is given files of these names; those that do not exist it leaves out.
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA
    ${debian_dir}/Runtime/shlibs ${debian_dir}/Runtime/symbols
    ${PROJECT_SOURCE_DIR}/cmake/debian/triggers
    ${debian_dir}/none/postinst ${debian_dir}/none/postrm)

set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME ${package_of_Development})
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "${package_of_Runtime} (= ${debian_version})")
# Only the static library needs them.
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SUGGESTS "libopenblas-dev, libjansson-dev")
if(has_xsmm)
  string(APPEND CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SUGGESTS ", libxsmm-dev")
endif()
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION
    "multi-head attention on the CPU - development files
${about}
This package contains the header, the static library and what CMake and
pkg-config need. Who links the static library needs a BLAS and jansson for
development as well.")

set(CPACK_DEBIAN_TOOLS_PACKAGE_NAME ${package_of_Tools})
set(CPACK_DEBIAN_TOOLS_PACKAGE_SECTION math)
set(CPACK_DEBIAN_TOOLS_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_TOOLS_PACKAGE_DEPENDS "${package_of_Runtime} (>= ${PROJECT_VERSION})")
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR})
set(CPACK_COMPONENT_TOOLS_DESCRIPTION
    "multi-head attention on the CPU - command
${about}
This package contains the command mha, which runs one layer over arrays in
files and shows each step of an example.")

# libmha_mpi, for the MPI that it was built with: its libraries follow from the symbols it needs, its
# headers from where they lie.
if(TARGET mha_mpi)
  set(mpi_dev "libmpich-dev")
  if(mpi_wrapper MATCHES "openmpi")
    set(mpi_dev "libopenmpi-dev")
  endif()
  set(about_mpi "Spreads attention layers over the processes of an MPI communicator, by
heads and by positions.
")
  set(CPACK_DEBIAN_MPIRUNTIME_PACKAGE_NAME ${package_of_MpiRuntime})
  set(CPACK_DEBIAN_MPIRUNTIME_PACKAGE_SECTION libs)
  set(CPACK_DEBIAN_MPIRUNTIME_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_MPIRUNTIME_PACKAGE_DEPENDS "${package_of_Runtime} (>= ${PROJECT_VERSION})")
  set(CPACK_DEBIAN_MPIRUNTIME_PACKAGE_CONTROL_EXTRA
      ${debian_dir}/MpiRuntime/shlibs ${debian_dir}/MpiRuntime/symbols
      ${PROJECT_SOURCE_DIR}/cmake/debian/triggers
      ${debian_dir}/none/postinst ${debian_dir}/none/postrm)
  set(CPACK_COMPONENT_MPIRUNTIME_DESCRIPTION
      "multi-head attention over MPI - shared library
${about_mpi}
This package contains the shared library.")
  set(CPACK_DEBIAN_MPIDEVELOPMENT_PACKAGE_NAME ${package_of_MpiDevelopment})
  set(CPACK_DEBIAN_MPIDEVELOPMENT_PACKAGE_SECTION libdevel)
  string(CONCAT CPACK_DEBIAN_MPIDEVELOPMENT_PACKAGE_DEPENDS
         "${package_of_MpiRuntime} (= ${debian_version}), "
         "${package_of_Development} (= ${debian_version}), ${mpi_dev}")
  set(CPACK_COMPONENT_MPIDEVELOPMENT_DESCRIPTION
      "multi-head attention over MPI - development files
${about_mpi}
This package contains the header and what CMake and pkg-config need.")
  set(CPACK_DEBIAN_MPITOOLS_PACKAGE_NAME ${package_of_MpiTools})
  set(CPACK_DEBIAN_MPITOOLS_PACKAGE_SECTION math)
  set(CPACK_DEBIAN_MPITOOLS_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_MPITOOLS_PACKAGE_DEPENDS "${package_of_MpiRuntime} (>= ${PROJECT_VERSION})")
  set(CPACK_COMPONENT_MPITOOLS_DESCRIPTION
      "multi-head attention over MPI - command
${about_mpi}
This package contains the command mha-mpi.")
endif()

include(CPack)
