/* Owns the printing of text that is not the command's own. */
#include "terminal.h"

#include "files/text.h"

#include <stdbool.h>
#include <string.h>

/* Whether the character, in UTF-8, breaks lines or turns the direction of writing: U+061C, U+200E,
 * U+200F, U+2028 to U+202E, U+2066 to U+2069. */
static bool turns(const char *character) {
  const unsigned char *c = (const unsigned char *)character;
  if (c[0] == 0xD8)
    return c[1] == 0x9C;
  if (c[0] != 0xE2)
    return false;
  return (c[1] == 0x80 && ((c[2] >= 0xA8 && c[2] <= 0xAE) || c[2] == 0x8E || c[2] == 0x8F)) ||
         (c[1] == 0x81 && c[2] >= 0xA6 && c[2] <= 0xA9);
}

/* No character's bytes begin with another one, so the first length that fits is its own. */
size_t mha_terminal_harmless(const char *text, size_t n) {
  char character[5] = "";
  for (size_t bytes = 1; bytes <= 4 && bytes <= n && text[0] != '\0'; bytes++) {
    character[bytes - 1] = text[bytes - 1];
    if (!mha_name_fault(character))
      return turns(character) ? 0 : bytes;
  }
  return 0;
}

int mha_terminal_print(const char *text, size_t n, FILE *stream) {
  int printed = 0;
  for (size_t at = 0; at < n;) {
    const size_t harmless = mha_terminal_harmless(text + at, n - at);
    if (harmless > 0)
      printed += fprintf(stream, "%.*s", (int)harmless, text + at);
    else
      printed += fprintf(stream, "\\x%02X", (unsigned)(unsigned char)text[at]);
    at += harmless > 0 ? harmless : 1;
  }
  return printed;
}
