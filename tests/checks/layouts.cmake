# docs/layouts.md tells the layout of every public struct and the value of every enumerator and
# constant: what mha.h says, measured by the compiler. With -DWRITE=ON the file is written anew:
#
#   cmake -DSOURCE=. -DWORK=build/layouts -DC_COMPILER=cc -DNM=nm -DWRITE=ON \
#     -P tests/checks/layouts.cmake
#
# A size is measured as that of an array in an object file, so nothing has to run: where the compiler
# takes -m32 the 32-bit columns are measured too, otherwise they are not compared.
include(${CMAKE_CURRENT_LIST_DIR}/../common.cmake)

set(file ${SOURCE}/docs/layouts.md)
file(REMOVE_RECURSE ${WORK})
file(MAKE_DIRECTORY ${WORK})

# ---- what the header declares ----

file(READ ${SOURCE}/include/mha.h text)
string(REGEX REPLACE "/\\*([^*]|\\*+[^*/])*\\*+/" " " text "${text}")
string(REGEX MATCHALL "#define MHA_[A-Z_]+ +(UINT32_C\\([0-9]+\\)|[0-9]+)" constants "${text}")
string(REPLACE ";" "@" text "${text}")
string(REGEX REPLACE "[ \n]+" " " text "${text}")
string(REGEX MATCHALL "typedef struct mha_[a-z_]+ {[^}]*} mha_[a-z_]+@" structs "${text}")
string(REGEX MATCHALL "typedef enum mha_[a-z_]+ {[^}]*} mha_[a-z_]+@" enums "${text}")

# members(<declaration of a struct>): sets `name`, `members` and, for each member, type_<member>.
macro(members declaration)
  string(REGEX REPLACE "^typedef struct (mha_[a-z_]+) .*$" "\\1" name "${declaration}")
  string(REGEX REPLACE "^[^{]*{ ?(.*)@ ?}[^}]*$" "\\1" body "${declaration}")
  string(REPLACE "@" ";" body "${body}")
  set(members "")
  foreach(member IN LISTS body)
    string(STRIP "${member}" member)
    if(member MATCHES "\\(\\*([a-z_]+)\\)")
      set(member_name ${CMAKE_MATCH_1})
      set(type_${member_name} "pointer to a function")
    elseif(member MATCHES "^(.*[ *])([a-z0-9_]+)(\\[[A-Z0-9_]+\\])?$")
      set(member_name ${CMAKE_MATCH_2})
      string(STRIP "${CMAKE_MATCH_1}${CMAKE_MATCH_3}" type_${member_name})
    else()
      fail("A member of ${name} is not understood: ${member}")
    endif()
    list(APPEND members ${member_name})
  endforeach()
endmacro()

# ---- what the compiler makes of it ----

set(source "#include <mha.h>\nchar at_pointer[sizeof(void *)];\n")
foreach(declaration IN LISTS structs)
  members("${declaration}")
  string(APPEND source "char size_${name}[sizeof(${name})];\n")
  foreach(member IN LISTS members)
    string(APPEND source "char at_${name}__${member}[offsetof(${name}, ${member}) + 1];\n"
                         "char size_${name}__${member}[sizeof((*(${name} *)0).${member})];\n")
  endforeach()
endforeach()
file(WRITE ${WORK}/layouts.c "${source}")

# measure(<bits> <option>...): sets <bits>_<array> to the array's size, and has_<bits>.
function(measure bits)
  execute_process(COMMAND ${C_COMPILER} -std=c11 ${ARGN} -ffreestanding -fno-common -I${SOURCE}/include
                          -c ${WORK}/layouts.c -o ${WORK}/${bits}.o
                  RESULT_VARIABLE result ERROR_VARIABLE error)
  if(NOT result EQUAL 0)
    message("No object file of ${bits} bits:\n${error}")
    return()
  endif()
  run(symbols ${NM} -P ${WORK}/${bits}.o)
  string(REGEX MATCHALL "[a-z0-9_]+ [A-Z] [0-9a-f]+ [0-9a-f]+" symbols "${symbols}")
  foreach(symbol IN LISTS symbols)
    string(REGEX MATCH "^([a-z0-9_]+) [A-Z] [0-9a-f]+ ([0-9a-f]+)$" ignored "${symbol}")
    math(EXPR size "0x${CMAKE_MATCH_2}")
    set(${bits}_${CMAKE_MATCH_1} ${size} PARENT_SCOPE)
    set(${bits}_${CMAKE_MATCH_1} ${size})
  endforeach()
  math(EXPR pointer_bits "8 * ${${bits}_at_pointer}")
  if(pointer_bits EQUAL bits)
    set(has_${bits} ON PARENT_SCOPE)
  endif()
endfunction()

measure(64)
measure(32 -m32)
if(NOT has_64)
  message("SKIPPED: the compiler's pointers do not have 64 bits")
  return()
endif()
if(WRITE AND NOT has_32)
  fail("${C_COMPILER} takes no -m32; rule: docs/layouts.md has both")
endif()

# ---- the document ----

set(document "# Layouts

For bindings that do not read C: every struct of `mha.h` with the offset and the size of each member in bytes, and the
values of enumerators and constants. `check_layouts` compares this file with the header;
`tests/checks/layouts.cmake` says how it is written anew.

The 64-bit columns hold wherever pointers and `size_t` have 8 bytes. The 32-bit ones are those of i386, where an
`int64_t` is aligned to 4 bytes; an ABI that aligns it to 8, as that of 32-bit ARM does, has other offsets, which its
compiler tells. Enumerators stand in members of type `int32_t`.

A struct that begins with `struct_size` is zeroed, then its size, as given here, is stored in that member. `mha_tensor`,
`mha_mask`, `mha_bias`, `mha_allocator` and `mha_error` have no such member and never grow; `mha_trace_step` is the
library's own.

## Structs
")
foreach(declaration IN LISTS structs)
  members("${declaration}")
  string(APPEND document "
### ${name}

${64_size_${name}} bytes, with 32-bit pointers ${32_size_${name}}.

| member | type | offset | bytes | offset, 32-bit | bytes, 32-bit |
|---|---|---|---|---|---|
")
  foreach(member IN LISTS members)
    math(EXPR at_64 "${64_at_${name}__${member}} - 1")
    math(EXPR at_32 "0${32_at_${name}__${member}} - 1")
    string(APPEND document "| ${member} | `${type_${member}}` | ${at_64} | ${64_size_${name}__${member}} "
                           "| ${at_32} | ${32_size_${name}__${member}} |\n")
  endforeach()
endforeach()

string(APPEND document "
## Enumerators
")
foreach(declaration IN LISTS enums)
  string(REGEX REPLACE "^typedef enum (mha_[a-z_]+) .*$" "\\1" name "${declaration}")
  string(REGEX MATCHALL "MHA_[A-Z0-9_]+ = [0-9]+" values "${declaration}")
  string(REGEX MATCHALL "MHA_[A-Z0-9_]+" names "${declaration}")
  list(LENGTH values n_values)
  list(LENGTH names n_names)
  if(n_values EQUAL 0 OR NOT n_values EQUAL n_names)
    fail("${name} has ${n_names} enumerators, ${n_values} of them with a value; rule: each has one")
  endif()
  string(APPEND document "\n### ${name}\n\n| name | value |\n|---|---|\n")
  foreach(value IN LISTS values)
    string(REPLACE " = " " | " value "${value}")
    string(APPEND document "| ${value} |\n")
  endforeach()
endforeach()

string(APPEND document "
## Constants

| name | value |
|---|---|
")
foreach(constant IN LISTS constants)
  string(REGEX REPLACE "#define (MHA_[A-Z_]+) +[^0-9]*(32_C\\()?([0-9]+)\\)?$" "\\1 | \\3" constant
                       "${constant}")
  string(APPEND document "| ${constant} |\n")
endforeach()

list(LENGTH structs n_structs)
list(LENGTH enums n_enums)
if(n_structs LESS 13 OR n_enums LESS 8)
  fail("Only ${n_structs} structs and ${n_enums} enums were found in mha.h")
endif()

if(WRITE)
  file(WRITE ${file} "${document}")
  return()
endif()
file(READ ${file} written)
if(NOT has_32)
  foreach(text IN ITEMS document written)
    string(REGEX REPLACE "\\| -?[0-9]* \\| [0-9]* \\|\n" "|\n" ${text} "${${text}}")
    string(REGEX REPLACE "pointers [0-9]*\\.\n" "pointers.\n" ${text} "${${text}}")
  endforeach()
endif()
if(NOT written STREQUAL document)
  file(WRITE ${WORK}/layouts.md "${document}")
  fail("docs/layouts.md is not what mha.h says, which is in ${WORK}/layouts.md. The head of
tests/checks/layouts.cmake says how it is written anew.")
endif()
