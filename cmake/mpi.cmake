# libmha_mpi: a library of its own over libmha and MPI, which is looked for by CMake's FindMPI
# (MPI_C_COMPILER names the wrapper of the one that is meant).
set(has_mpi FALSE)
if(MHA_MPI STREQUAL "AUTO")
  find_package(MPI QUIET COMPONENTS C)
  set(has_mpi ${MPI_C_FOUND})
elseif(MHA_MPI)
  find_package(MPI REQUIRED COMPONENTS C)
  set(has_mpi TRUE)
endif()
if(NOT has_mpi)
  return()
endif()

# Shared where libmha is, with a hidden copy of the floor of src/ that reads arguments and writes
# messages; a static one finds that in libmha.a.
if(MHA_BUILD_SHARED)
  add_library(mha_mpi SHARED ${MHA_MPI_SOURCES} ${MHA_BASE_SOURCES})
  target_link_libraries(mha_mpi PRIVATE ${math})
  set_target_properties(mha_mpi PROPERTIES DEFINE_SYMBOL MHA_MPI_BUILDING
                                           VERSION ${PROJECT_VERSION} SOVERSION ${MHA_ABI})
  mha_link_strictly(mha_mpi ${CMAKE_CURRENT_SOURCE_DIR}/cmake/libmha_mpi.map)
else()
  add_library(mha_mpi STATIC ${MHA_MPI_SOURCES})
  target_compile_definitions(mha_mpi PUBLIC MHA_MPI_STATIC)
endif()
add_library(mha::mha_mpi ALIAS mha_mpi)
target_include_directories(mha_mpi PRIVATE src PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
target_link_libraries(mha_mpi PUBLIC mha::mha MPI::MPI_C)
mha_compile_strictly(mha_mpi)
set_target_properties(mha_mpi PROPERTIES C_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON)
