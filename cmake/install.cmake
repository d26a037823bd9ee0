# Installation: components Runtime, Development and Tools, the CMake package and mha.pc. Nothing
# that is installed holds an absolute path, so the whole prefix may be moved; unless a folder outside
# the prefix was asked for.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# An absolute folder inside the prefix is what a relative one would be.
foreach(dir IN ITEMS BINDIR LIBDIR INCLUDEDIR MANDIR)
  set(folder "${CMAKE_INSTALL_${dir}}")
  cmake_path(IS_PREFIX CMAKE_INSTALL_PREFIX "${folder}" NORMALIZE is_inside)
  if(is_inside)
    file(RELATIVE_PATH CMAKE_INSTALL_${dir} "${CMAKE_INSTALL_PREFIX}" "${folder}")
  endif()
endforeach()
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mha)

# Two exports, because only the static library needs BLAS, jansson, threads and perhaps libxsmm where
# it is linked.
foreach(kind IN ITEMS shared static)
  set(target mha)
  if(kind STREQUAL "static")
    set(target mha_static)
  endif()
  if(NOT TARGET ${target})
    continue()
  endif()
  install(TARGETS ${target} EXPORT mha_${kind}
          RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT Runtime
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT Runtime
                  NAMELINK_COMPONENT Development
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT Development
          INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT mha_${kind} NAMESPACE mha:: FILE mha-${kind}-targets.cmake
          DESTINATION ${package_dir} COMPONENT Development)
  # The build tree is a package as well: mha_ROOT=<build>.
  export(EXPORT mha_${kind} NAMESPACE mha:: FILE ${PROJECT_BINARY_DIR}/mha-${kind}-targets.cmake)
endforeach()

if(TARGET mha_mpi)
  install(TARGETS mha_mpi EXPORT mha_mpi
          RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT MpiRuntime
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT MpiRuntime
                  NAMELINK_COMPONENT MpiDevelopment
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT MpiDevelopment
          INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT mha_mpi NAMESPACE mha:: FILE mha-mpi-targets.cmake DESTINATION ${package_dir}
          COMPONENT MpiDevelopment)
  export(EXPORT mha_mpi NAMESPACE mha:: FILE ${PROJECT_BINARY_DIR}/mha-mpi-targets.cmake)
  install(FILES include/mha_mpi.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT MpiDevelopment)
endif()

install(FILES include/mha.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT Development)

set(static_dependencies MhaCBLAS MhaJansson)
if(has_xsmm)
  list(APPEND static_dependencies MhaXsmm)
endif()
configure_package_config_file(cmake/mha-config.cmake.in ${PROJECT_BINARY_DIR}/mha-config.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO
                              NO_CHECK_REQUIRED_COMPONENTS_MACRO)
# Until 1.0 each minor release may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/mha-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
set(finders "")
foreach(dependency IN LISTS static_dependencies)
  set(finder ${PROJECT_BINARY_DIR}/Find${dependency}.cmake)
  configure_file(cmake/Find${dependency}.cmake ${finder} COPYONLY)
  list(APPEND finders ${finder})
endforeach()
install(FILES ${PROJECT_BINARY_DIR}/mha-config.cmake ${PROJECT_BINARY_DIR}/mha-config-version.cmake
              ${finders}
        DESTINATION ${package_dir} COMPONENT Development)

# mha.pc names libraries, never their folders, unless the linker does not look there by itself. What
# was given as a mere name or as an option stays what it is.
set(pc_private ${MhaCBLAS_STATIC_FLAGS})
foreach(library IN LISTS MhaCBLAS_LIBRARIES MhaJansson_LIBRARIES MhaXsmm_LIBRARIES)
  get_filename_component(folder "${library}" DIRECTORY)
  get_filename_component(name "${library}" NAME)
  string(REGEX REPLACE "^lib|\\.(so|a|dylib).*$" "" name "${name}")
  if(library MATCHES "^-")
    list(APPEND pc_private "${library}")
    continue()
  elseif(folder AND NOT folder IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES)
    string(REPLACE " " "\\ " folder "${folder}")
    list(APPEND pc_private "-L${folder}")
  endif()
  list(APPEND pc_private "-l${name}")
endforeach()
if(MHA_MATH_LIBRARY)
  list(APPEND pc_private -lm)
endif()
list(JOIN pc_private " " pc_private)
string(APPEND pc_private " -pthread")

# All from the folder of mha.pc, if it is inside the prefix; Debian's libdir has one level more than
# others'. pkg-config wants spaces escaped, which it does itself in pcfiledir.
string(REPLACE " " "\\ " pc_prefix "${CMAKE_INSTALL_PREFIX}")
if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  file(RELATIVE_PATH up "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" /prefix)
  string(REGEX REPLACE "/$" "" pc_prefix "\${pcfiledir}/${up}")
endif()
foreach(dir IN ITEMS LIBDIR INCLUDEDIR)
  string(REPLACE " " "\\ " pc_${dir} "${CMAKE_INSTALL_${dir}}")
  if(NOT IS_ABSOLUTE "${CMAKE_INSTALL_${dir}}")
    string(PREPEND pc_${dir} "\${prefix}/")
  endif()
endforeach()
# With the postfix of its kind of build, such as CMAKE_DEBUG_POSTFIX.
set(pc_cflags "")
if(MHA_BUILD_SHARED)
  set(pc_public "-l$<TARGET_FILE_BASE_NAME:mha>")
else()
  set(pc_public "-l$<TARGET_FILE_BASE_NAME:mha_static> ${pc_private}")
  set(pc_private "")
  set(pc_cflags " -DMHA_STATIC")
endif()
configure_file(cmake/mha.pc.in ${PROJECT_BINARY_DIR}/mha.pc.in @ONLY)
file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/pkgconfig/$<CONFIG>/mha.pc
     INPUT ${PROJECT_BINARY_DIR}/mha.pc.in)
install(FILES ${PROJECT_BINARY_DIR}/pkgconfig/$<CONFIG>/mha.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT Development)

if(TARGET mha_mpi)
  set(pc_mpi_cflags "")
  set(pc_mpi_libs "")
  foreach(folder IN LISTS MPI_C_INCLUDE_DIRS)
    string(APPEND pc_mpi_cflags " -I${folder}")
  endforeach()
  foreach(library IN LISTS MPI_C_LIBRARIES)
    get_filename_component(folder "${library}" DIRECTORY)
    get_filename_component(name "${library}" NAME)
    string(REGEX REPLACE "^lib|\\.(so|a|dylib).*$" "" name "${name}")
    if(folder AND NOT folder IN_LIST CMAKE_C_IMPLICIT_LINK_DIRECTORIES)
      string(APPEND pc_mpi_libs " -L${folder}")
    endif()
    string(APPEND pc_mpi_libs " -l${name}")
  endforeach()
  if(NOT MHA_BUILD_SHARED)
    string(APPEND pc_mpi_cflags " -DMHA_MPI_STATIC")
  endif()
  configure_file(cmake/mha_mpi.pc.in ${PROJECT_BINARY_DIR}/mha_mpi.pc.in @ONLY)
  file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/pkgconfig/$<CONFIG>/mha_mpi.pc
       INPUT ${PROJECT_BINARY_DIR}/mha_mpi.pc.in)
  install(FILES ${PROJECT_BINARY_DIR}/pkgconfig/$<CONFIG>/mha_mpi.pc
          DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT MpiDevelopment)
endif()

# mha_find_own_library(<target> <folder>): what is installed in <folder> finds the library of its own
# prefix. Debian's policy wants no run path.
function(mha_find_own_library target folder)
  if(NOT MHA_BUILD_SHARED OR MHA_DEBIAN OR DEFINED CMAKE_INSTALL_RPATH)
    return()
  endif()
  set(run_path "${CMAKE_INSTALL_LIBDIR}")
  if(NOT IS_ABSOLUTE "${run_path}" AND NOT IS_ABSOLUTE "${folder}")
    file(RELATIVE_PATH run_path "/prefix/${folder}" "/prefix/${run_path}")
    set(origin "$ORIGIN")
    if(APPLE)
      set(origin "@loader_path")
    endif()
    string(PREPEND run_path "${origin}/")
  elseif(NOT IS_ABSOLUTE "${run_path}")
    string(PREPEND run_path "${CMAKE_INSTALL_PREFIX}/")
  endif()
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${run_path}")
endfunction()

if(TARGET mha_mpi)
  mha_find_own_library(mha_mpi "${CMAKE_INSTALL_LIBDIR}")
endif()
if(TARGET mha_mpi_cli)
  mha_find_own_library(mha_mpi_cli "${CMAKE_INSTALL_BINDIR}")
  install(TARGETS mha_mpi_cli DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT MpiTools)
  if(NOT MHA_DEBIAN)
    install(FILES docs/mha-mpi.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT MpiTools)
  endif()
endif()
if(MHA_BUILD_CLI)
  mha_find_own_library(mha_cli "${CMAKE_INSTALL_BINDIR}")
  install(TARGETS mha_cli DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT Tools)
  if(NOT MHA_DEBIAN) # there it is compressed
    install(FILES docs/mha.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT Tools)
  endif()
endif()

if(MHA_DEBIAN)
  include(cmake/debian.cmake)
elseif(PROJECT_IS_TOP_LEVEL) # cpack writes manifests too, of files that belong to dpkg
  add_custom_target(uninstall COMMAND ${CMAKE_COMMAND} -DBUILD=${PROJECT_BINARY_DIR} -P
                                      ${PROJECT_SOURCE_DIR}/cmake/uninstall.cmake VERBATIM)
endif()
