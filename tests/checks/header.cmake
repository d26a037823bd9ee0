# mha.h compiles alone, first and twice, in every language that may include it, without a warning.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})
set(body "#include <mha.h>
#include <mha.h>
void use(mha_config *config, mha_forward_args *args, mha_rules *rules);
void use(mha_config *config, mha_forward_args *args, mha_rules *rules)
{
  mha_config_init(config, 512, 8);
  config->flags = MHA_SCALE;
  MHA_INIT(args);
  MHA_INIT(rules);
  rules->flags = MHA_SCALE | MHA_SOFTCAP | MHA_WINDOW;
  rules->alignment = MHA_ALIGN_BOTTOM_RIGHT;
}
")
file(WRITE ${WORK}/header.c "${body}")
file(WRITE ${WORK}/header.cpp "${body}")
set(strict -fsyntax-only -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wundef -Werror
           -I${SOURCE}/include)
foreach(standard IN ITEMS c99 c11 c17)
  run(ignored ${C_COMPILER} -std=${standard} ${strict} -Wstrict-prototypes -Wc++-compat
      ${WORK}/header.c)
endforeach()
run(ignored ${C_COMPILER} -std=c11 ${strict} -DMHA_STATIC ${WORK}/header.c)
if(CXX_COMPILER)
  foreach(standard IN ITEMS c++11 c++17 c++20)
    run(ignored ${CXX_COMPILER} -std=${standard} ${strict} -Wold-style-cast ${WORK}/header.cpp)
  endforeach()
endif()

# The three spellings of the release in the header agree.
file(READ ${SOURCE}/include/mha.h header)
foreach(part IN ITEMS MAJOR MINOR PATCH)
  string(REGEX MATCH "#define MHA_VERSION_${part} +([0-9]+)" ignored "${header}")
  list(APPEND numbers ${CMAKE_MATCH_1})
endforeach()
list(JOIN numbers "." release)
if(NOT release STREQUAL VERSION)
  fail("MHA_VERSION_STRING is ${VERSION}, its parts say ${release}")
endif()
