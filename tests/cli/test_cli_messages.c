/* What the command says: inspect about files, --help and --version about itself, and one line about
 * what it refuses. */
#define _XOPEN_SOURCE 700

#include "command.h"
#include "inputs.h"

#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- inspect --------------------------------------------------------------------------------- */

/* Every line of the text, in order, with runs of spaces read as one. */
static void check_lines(const char *const *lines) {
  static char text[COMMAND_TEXT_BYTES];
  size_t n = 0;
  for (const char *c = command_out; *c != '\0'; c++)
    if (*c != ' ' || n == 0 || text[n - 1] != ' ')
      text[n++] = *c;
  text[n] = '\0';
  const char *at = text;
  for (; *lines; lines++) {
    const size_t length = strlen(*lines);
    if (strncmp(at, *lines, length) != 0 || at[length] != '\n')
      test_failed("no line \"%s\" at \"%.60s\" in\n%s", *lines, at, command_out);
    at += length + 1;
  }
  assert_string_equal(at, "");
}

#define CHECK_LINES(...) check_lines((const char *const[]){__VA_ARGS__, NULL})

static void inspect_shows_tensors_and_layers(void **state) {
  static const inputs_tensor tensors[] = {
      {"b.q_proj.bias", "F16", "4", 8, NULL},
      {"b.q_proj.weight", "F16", "4,2", 16, NULL},
      {"b.o_proj.weight", "I8", "2,4", 8, NULL},
      {"b.k_proj.weight", "BF16", "4,2", 16, NULL},
      {"b.v_proj.weight", "F32", "4,2", 32, NULL},
      {"c.in_proj_weight", "F32", "6,2", 48, NULL},
      {"c.bias_k", "F32", "1,1,2", 8, NULL},
      {"steps", "I64", "", 8, NULL},
      {"none", "F64", "0", 0, NULL},
  };
  (void)state;
  inputs_put_safetensors("in.safetensors", tensors, N_TENSORS(tensors));
  RUN_WELL("inspect", "in.safetensors");
  CHECK_LINES(
      "in.safetensors: safetensors file, 9 tensors", "", "tensors",
      " BF16 (4, 2) 16 bytes b.k_proj.weight", " I8 (2, 4) 8 bytes b.o_proj.weight",
      " F16 (4,) 8 bytes b.q_proj.bias", " F16 (4, 2) 16 bytes b.q_proj.weight",
      " F32 (4, 2) 32 bytes b.v_proj.weight", " F32 (1, 1, 2) 8 bytes c.bias_k",
      " F32 (6, 2) 48 bytes c.in_proj_weight", " F64 (0,) 0 bytes none", " I64 () 8 bytes steps",
      "", "layer \"b.\": Hugging Face, q_proj, [out][in]", " Wq F16 (4, 2) b.q_proj.weight",
      " Wk BF16 (4, 2) b.k_proj.weight", " Wv F32 (4, 2) b.v_proj.weight",
      " Wo I8 (2, 4) b.o_proj.weight (a type that is not loaded)", " bq F16 (4,) b.q_proj.bias",
      " 80 bytes in all", " cache: each token takes 32 bytes as f32, 16 as f16 or bf16", "",
      "layer \"c.\": PyTorch, packed, [out][in]", " Wq Wk Wv F32 (6, 2) c.in_proj_weight",
      " 48 bytes in all", " missing: c.out_proj.weight", " not supported: c.bias_k");
  RUN_WELL("inspect", "in.safetensors", "--prefix", "c.");
  CHECK_LINES("in.safetensors: safetensors file, 9 tensors", "", "tensors",
              " F32 (1, 1, 2) 8 bytes c.bias_k", " F32 (6, 2) 48 bytes c.in_proj_weight", "",
              "layer \"c.\": PyTorch, packed, [out][in]", " Wq Wk Wv F32 (6, 2) c.in_proj_weight",
              " 48 bytes in all", " missing: c.out_proj.weight", " not supported: c.bias_k");
  RUN_WELL("inspect", "--prefix=", "in.safetensors");
  assert_non_null(strstr(command_out, " b.q_proj.bias\n"));
  assert_string_equal(command_out + strlen(command_out) - 10, "\nno layer\n");
  assert_int_equal(unlink("in.safetensors"), 0);
}

static void inspect_shows_folders(void **state) {
  (void)state;
  RUN_WELL("inspect", "w");
  CHECK_LINES("w: folder, 6 tensors", "", "tensors", " <f4 (6, 10) 240 bytes a.W_K",
              " <f4 (8, 7) 224 bytes a.W_O", " <f4 (8, 20) 640 bytes a.W_Q",
              " <f4 (5, 4) 80 bytes a.W_V", " <f4 (10,) 40 bytes a.b_K", " <f4 (7,) 28 bytes a.b_O",
              "", "layer \"a.\": the article, [in][out]", " Wq <f4 (8, 20) a.W_Q",
              " Wk <f4 (6, 10) a.W_K", " Wv <f4 (5, 4) a.W_V", " Wo <f4 (8, 7) a.W_O",
              " bk <f4 (10,) a.b_K", " bo <f4 (7,) a.b_O", " 1252 bytes in all",
              " cache: each token takes 56 bytes as f32, 28 as f16 or bf16");
}

/* Nothing in the text but printable ASCII and the ends of lines. */
static void check_harmless(const char *text) {
  for (const char *c = text; *c != '\0'; c++)
    if (*c != '\n' && (*c < ' ' || *c > '~'))
      test_failed("byte 0x%02X in \"%s\"", (unsigned)(unsigned char)*c, text);
}

static void inspect_refuses_bad_files(void **state) {
  static const struct {
    const char *bytes;
    size_t n;
  } files[] = {
      {"", 0},
      {"\2\0\0\0\0\0\0", 7},
      {"\xff\xff\xff\xff\xff\xff\xff\xff{}", 10},
      {"\2\0\0\0\0\0\0\0{}x", 11},
      {"\2\0\0\0\0\0\0\0[]", 10},
      {"\x93NUMPY\1\0", 8},
  };
  (void)state;
  for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
    test_note("file %zu", i);
    test_put_file("bad.safetensors", files[i].bytes, files[i].n);
    RUN_BADLY(1, "bad.safetensors", "inspect", "bad.safetensors");
  }
  assert_int_equal(unlink("bad.safetensors"), 0);
  test_put_file("model", "GGUF\3\0\0\0\254\0\0\0\0\0\0\0", 16);
  RUN_BADLY(1, "model has a tensor count of 172, but 0 bytes follow at byte 8; rule: ", "inspect",
            "model");
  RUN_BADLY(1, "model seems to be a GGUF file; rule: an array is a .npy file", "run", "--weights",
            article, "--heads", "2", "--input", "model", "--output", "y.npy");
  test_put_file("model", "\x9a\x99\x99\x3e\xcd\xcc\x4c\x3e\x01", 9);
  RUN_BADLY(1, "model seems to be a file of another kind; rule: weights are", "inspect", "model");
  test_put_file("model", "", 0);
  RUN_BADLY(1, "model is empty; rule: weights are", "inspect", "model");
  assert_int_equal(unlink("model"), 0);
  assert_int_equal(mkdir("bad", 0700), 0);
  RUN_BADLY(1, "bad is a folder without .npy files; rule: weights are", "inspect", "bad");
  assert_int_equal(rmdir("bad"), 0);
  RUN_BADLY(1, "absent", "inspect", "absent");
  RUN_BADLY(1, "/dev/null", "inspect", "/dev/null");
  assert_int_equal(mkdir("bad", 0700), 0);
  test_put_file("bad/x.npy", "\x93NUMPY\1\0", 8);
  RUN_BADLY(1, "bad/x.npy", "inspect", "bad");
  assert_int_equal(unlink("bad/x.npy") + rmdir("bad"), 0);
}

/* What a file says never acts on the terminal, be the file refused or shown. */
static void hostile_text_is_shown_harmless(void **state) {
  static const inputs_tensor shown[] = {
      {"\xe2\x80\xae"
       "a.W_Q",
       "\\u001b[31m", "1", 1, NULL},
      {"\\u2066"
       "b",
       "x\\ny", "1", 1, NULL},
      {"\xd8\x9c"
       "c",
       "\xc2\x9b"
       "2J",
       "1", 1, NULL},
  };
  static const char *const refused[] = {"\\u001b[2J", "\\n",  "\\u007f", "\\u009b",
                                        "\xc2\x9b",   "\xff", "\\ud800", "\\u0000"};
  (void)state;
  inputs_put_safetensors("\x1b]0;x\a", shown, N_TENSORS(shown));
  RUN_WELL("inspect", "\x1b]0;x\a");
  check_harmless(command_out);
  assert_memory_equal(command_out, "\\x1B]0;x\\x07: ", 13);
  assert_non_null(strstr(command_out, " \\xE2\\x80\\xAEa.W_Q\n"));
  assert_non_null(strstr(command_out, "layer \"\\xE2\\x80\\xAEa.\""));
  assert_non_null(strstr(command_out, " \\xE2\\x81\\xA6b\n"));
  assert_non_null(strstr(command_out, " \\xD8\\x9Cc\n"));
  RUN_BADLY(1, "\\x1B]0;x\\x07", ODD_INPUTS, "--weights", "\x1b]0;x\a", "--prefix", "");
  check_harmless(command_err);
  assert_int_equal(unlink("\x1b]0;x\a"), 0);
  for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
    const inputs_tensor tensors[] = {{refused[i], "F32", "1", 4, NULL}};
    test_note("name %zu", i);
    inputs_put_safetensors("bad.safetensors", tensors, 1);
    RUN_BADLY(1, "bad.safetensors", "inspect", "bad.safetensors");
    check_harmless(command_err);
  }
  assert_int_equal(unlink("bad.safetensors"), 0);
}

/* ---- Bad command lines ----------------------------------------------------------------------- */

static const struct {
  const char *fragment;
  const char *words[26];
} usage_rows[] = {
    {"no command", {NULL}},
    {"unknown command \"dance\"", {"dance"}},
    {"unknown command \"--trace\"", {"--trace"}},
    {"unknown command \"\"", {""}},
    {"--version is given with \"x\"; rule: it stands alone", {"--version", "x"}},
    {"--help is given with \"run\"; rule: it stands alone", {"--help", "run"}},
    {"unknown option \"--steps\"", {"demo", "--steps"}},
    {"unknown option \"--svg\"", {"inspect", article, "--svg", "p.svg"}},
    {"--svg has no value; rule: --svg FILE", {"demo", "--svg"}},
    {"--svg is empty", {"demo", "--svg="}},
    {"--labels is given without --svg", {"demo", "--labels", "a,b,c,d,e,f,g"}},
    {"--labels is given without --svg", {ARTICLE_RUN, "--output", "y.npy", "--labels", "abcdefg"}},
    {"--labels has 6 labels for 7 tokens; rule: one for each",
     {"demo", "--svg", "p.svg", "--labels", "abcdef"}},
    {"--labels has 8 labels for 7 tokens",
     {"demo", "--svg", "p.svg", "--labels", "1,2,3,4,5,6,7,"}},
    {"--labels has 0 labels for 7 tokens", {"demo", "--svg", "p.svg", "--labels", ""}},
    {"--labels has 1 labels for 7 tokens",
     {ARTICLE_RUN, "--output", "y.npy", "--svg", "p.svg", "--labels", "\xE8\xBF\x9C"}},
    {"--labels is given with --key", {ODD_RUN, "--svg", "p.svg", "--labels", "a,b,c,d,e"}},
    {"--svg is given with --stage final; rule: the picture shows the stage weights",
     {ARTICLE_RUN, "--output", "y.npy", "--svg", "p.svg", "--attn-weights", "p.npy", "--stage",
      "final"}},
    {"--backward is given without --gradients; rule: it needs that one",
     {ARTICLE_RUN, "--output", "y.npy", "--backward", "q.npy"}},
    {"--gradients is given without --backward; rule: it needs that one",
     {ARTICLE_RUN, "--output", "y.npy", "--gradients", "g"}},
    {"--backward is given with --steps; rule: nothing passes back through a cache",
     {ARTICLE_STEPS, "--backward", "q.npy", "--gradients", "g"}},
    {"--backward is given with --steps",
     {ARTICLE_STEPS, "--cache-type", "f16", "--backward", "q.npy", "--gradients", "g"}},
    {"--backward is \"-\"; rule: a path", {"run", "--backward", "-"}},
    {"--gradients is empty", {"run", "--gradients="}},
    {"unknown option \"--backward\"", {"demo", "--backward", "q.npy"}},
    {"--dropout is given with --steps; rule: which weights are dropped depends on Lq and Lk",
     {ARTICLE_STEPS, "--dropout", "0.5"}},
    {"--seed is given without --dropout; rule", {ARTICLE_RUN, "--output", "y.npy", "--seed", "1"}},
    {"--call is given without --dropout; rule", {ARTICLE_RUN, "--output", "y.npy", "--call", "1"}},
    {"--dropout is \"1\"; rule: a number from 0 and below 1", {"run", "--dropout", "1"}},
    {"--dropout is \"0.99999999\"", {"run", "--dropout", "0.99999999"}}, /* 1 as a float */
    {"--dropout is \"-0.5\"", {"run", "--dropout=-0.5"}},
    {"--dropout is \"nan\"", {"run", "--dropout", "nan"}},
    {"--dropout is \"inf\"", {"run", "--dropout", "inf"}},
    {"--dropout is \"0.5x\"", {"run", "--dropout", "0.5x"}},
    {"--dropout is \"\"", {"run", "--dropout="}},
    {"--seed is \"-1\"; rule: a whole number from 0 to 18446744073709551615",
     {"run", "--seed", "-1"}},
    {"--seed is \"18446744073709551616\"", {"run", "--seed", "18446744073709551616"}},
    {"--seed is \"1.5\"", {"run", "--seed", "1.5"}},
    {"--seed is \" 1\"", {"run", "--seed", " 1"}},
    {"--seed is \"+1\"", {"run", "--seed", "+1"}},
    {"--call is \"\"", {"run", "--call", ""}},
    {"--call is \"0x1\"", {"run", "--call", "0x1"}},
    {"--steps is given without --causal", {ARTICLE_RUN, "--output", "y.npy", "--steps"}},
    {"--key is given with --steps", {ODD_RUN, "--steps", "--causal"}},
    {"--align is given with --steps",
     {ARTICLE_RUN, "--output", "y.npy", "--steps", "--causal", "--align", "top-left"}},
    {"--lengths is given with --steps; rule: in steps the cache counts",
     {ARTICLE_RUN, "--output", "y.npy", "--steps", "--causal", "--lengths", "7"}},
    {"--query-lengths is given with --steps",
     {ARTICLE_RUN, "--output", "y.npy", "--steps", "--causal", "--query-lengths", "7"}},
    {"FILE|DIR is missing; rule: a path", {"inspect"}},
    {"FILE|DIR is missing", {"inspect", "--prefix", "a."}},
    {"FILE|DIR is empty", {"inspect", ""}},
    {"FILE|DIR is given twice", {"inspect", article, "w"}},
    {"unknown option \"-w\"", {"inspect", "-w"}},
    {"unknown option \"--heads\"", {"inspect", article, "--heads", "2"}},
    {"FILE|DIR is missing; rule: a path", {"convert", "--type", "f16"}},
    {"OUT is missing; rule: a path", {"convert", "w", "--type", "f16"}},
    {"OUT is given twice", {"convert", "w", "out.st", "x", "--type", "f16"}},
    {"OUT is empty", {"convert", "w", "", "--type", "f16"}},
    {"--type is missing; rule: --type f32|f16|bf16", {"convert", "w", "out.st", "--heads", "4"}},
    {"--type is \"q8_0\"; rule: f32|f16|bf16, since safetensors has no types with blocks",
     {"convert", "w", "out.st", "--type", "q8_0"}},
    {"--type is \"Q4_0\"; rule: f32|f16|bf16, since safetensors", {"convert", "--type", "Q4_0"}},
    {"--type is \"f64\"; rule: f32|f16|bf16\n", {"convert", "--type", "f64"}},
    {"--type is \"f1\"; rule: f32", {"convert", "--type", "f1"}},
    {"--type is \"f160\"; rule: f32", {"convert", "--type", "f160"}},
    {"--type is \"\"; rule: f32", {"convert", "--type="}},
    {"--heads is missing; rule: --heads H, since w does not tell it",
     {"convert", "w", "out.st", "--type", "f16", "--prefix", "a."}},
    {"--kv-heads is 3 for --heads 4",
     {"convert", "w", "out.st", "--type", "f16", "--heads", "4", "--kv-heads", "3"}},
    {"OUT is \"./w/a.b_O.npy\", which FILE|DIR names too; rule: a result replaces no weights",
     {"convert", "w/a.b_O.npy", "./w/a.b_O.npy", "--type", "f16", "--heads", "4"}},
    {"OUT is \"stdout.txt\", to which standard output goes; rule: a result has a file of its own",
     {"convert", "w", "stdout.txt", "--type", "f16", "--heads", "4"}},
    {"unknown option \"--keep-type\"", {"convert", "w", "out.st", "--keep-type"}},
    {"\"--keep-type=1\" has a value", {"run", "--keep-type=1"}},
    {"unknown option \"--type\"", {"run", "--type", "f16"}},
    {"--kv-heads is given without --heads; rule: it needs that one",
     {"convert", "w", "out.st", "--type", "f16", "--kv-heads", "2"}},
    {"--cache-type is given without --steps",
     {ARTICLE_RUN, "--output", "y.npy", "--causal", "--cache-type", "f16"}},
    {"--cache-pages is given without --steps",
     {ARTICLE_RUN, "--output", "y.npy", "--causal", "--cache-pages", "16"}},
    {"--cache-pages is \"x\"", {"run", "--cache-pages", "x"}},
    {"--cache-pages is \"-16\"; rule: a whole number", {"run", "--cache-pages", "-16"}},
    {"--cache-type is \"q4_0\"; rule: f32|f16|bf16|q8_0\n", {"run", "--cache-type", "q4_0"}},
    {"--cache-type is \"half\"; rule: f32|f16|bf16|q8_0\n", {"run", "--cache-type=half"}},
    {"unexpected word \"w\"", {ARTICLE_RUN, "w"}},
    {"unknown option \"--heads\"", {"demo", "--heads", "2"}},
    {"unexpected word \"x\"", {"demo", "x"}},
    {"unexpected word \"\"", {"demo", ""}},
    {"unknown option \"--\"", {"demo", "--"}},
    {"unknown option \"-\"", {"demo", "-"}},
    {"unknown option \"--trac\"", {"demo", "--trac"}},
    {"unknown option \"--traces\"", {"demo", "--traces"}},
    {"unknown option \"-=\"", {"demo", "-="}},
    {"\"--trace=1\" has a value", {"demo", "--trace=1"}},
    {"--trace is given twice", {"demo", "--trace", "--trace"}},
    {"--heads is given twice", {ARTICLE_RUN, "--heads", "2", "--output", "y.npy"}},
    {"--output is missing", {ARTICLE_RUN}},
    {"--input is missing", {"run", "--weights", article, "--heads", "2", "--output", "y.npy"}},
    {"--heads is missing; rule: --heads H, since ",
     {"run", "--weights", article, "--input", article_x, "--output", "y.npy"}},
    {"--weights is missing", {"run", "--heads", "2", "--input", "x", "--output", "y.npy"}},
    {"--output has no value", {ARTICLE_RUN, "--output"}},
    {"--output is empty", {ARTICLE_RUN, "--output", ""}},
    {"--output is empty", {ARTICLE_RUN, "--output="}},
    {"unexpected word \"y.npy\"", {"run", "--input", "--output", "y.npy"}},
    {"--value is given without --key", {ARTICLE_RUN, "--output", "y.npy", "--value", "v.npy"}},
    {"--stage is given without --attn-weights",
     {ARTICLE_RUN, "--output", "y.npy", "--stage", "capped"}},
    {"--lse is \"y.npy\", the file that --output names; rule: each result has its own",
     {ARTICLE_RUN, "--output", "y.npy", "--lse", "y.npy"}},
    {"--lse is \"./y.npy\", the file that --output names",
     {ARTICLE_RUN, "--output", "y.npy", "--lse", "./y.npy"}},
    {"--svg is \"w/../y.npy\", the file that --output names",
     {ARTICLE_RUN, "--output", "y.npy", "--svg", "w/../y.npy"}},
    {"--lse is \"absent/y\", the file that --output names",
     {ARTICLE_RUN, "--output", "absent/y", "--lse", "absent/y"}},
    {"--lse is \"p.npy\", the file that --attn-weights names",
     {ARTICLE_RUN, "--output", "y.npy", "--attn-weights", "p.npy", "--lse", "p.npy"}},
    {"--lengths is \"3\", numbers for 1 batch entries; rule: one for each of the 2",
     {ODD_RUN, "--lengths", "3"}},
    {"--query-lengths is \"3,3,3\", numbers for 3 batch entries",
     {ODD_RUN, "--query-lengths", "3,3,3"}},
    {"--lengths is \"7,6\", 7 for batch entry 0; rule: at most Lk = 6",
     {ODD_RUN, "--lengths", "7,6"}},
    {"--lengths is \"8\", 8 for batch entry 0; rule: at most Lk = 7",
     {ARTICLE_RUN, "--output", "y.npy", "--lengths", "8"}},
    {"--query-lengths is \"5,6\", 6 for batch entry 1; rule: at most Lq = 5",
     {ODD_RUN, "--query-lengths", "5,6"}},
    {"--kv-heads is 3 for --heads 2", {ARTICLE_RUN, "--output", "y.npy", "--kv-heads", "3"}},
    {"--kv-heads is \"0\"", {ARTICLE_RUN, "--output", "y.npy", "--kv-heads", "0"}},
    {"--heads is \"0\"", {"run", "--heads", "0"}},
    {"--heads is \"-2\"", {"run", "--heads", "-2"}},
    {"--heads is \"2x\"", {"run", "--heads", "2x"}},
    {"--heads is \" 2\"", {"run", "--heads", " 2"}},
    {"--heads is \"2,\"", {"run", "--heads", "2,"}},
    {"--heads is \"\"", {"run", "--heads="}},
    {"--heads is \"2.0\"", {"run", "--heads", "2.0"}},
    {"--heads is \"99999999999999999999\"", {"run", "--heads", "99999999999999999999"}},
    {"--threads is \"-1\"", {"run", "--threads", "-1"}},
    {"--threads is \"1025\"", {"run", "--threads", "1025"}},
    {"--stage is \"0\"; rule: a name, scaled|capped|final|weights; counted from 0 in this order it "
     "is scaled",
     {"run", "--stage", "0"}},
    {"is capped", {"run", "--stage", "1"}},
    {"is final", {"run", "--stage", "2"}},
    {"is weights", {"run", "--stage", "3"}},
    {"--stage is \"4\"; rule: scaled|capped|final|weights", {"run", "--stage", "4"}},
    {"--stage is \"-1\"; rule: scaled", {"run", "--stage", "-1"}},
    {"--stage is \"00\"; rule: scaled", {"run", "--stage", "00"}},
    {"--stage is \"Final\"; rule: scaled", {"run", "--stage", "Final"}},
    {"--stage is \"\"; rule: scaled", {"run", "--stage="}},
    {"--output is \"-\"; rule: a path, and no stream; ./- is the file of that name",
     {"run", "--output", "-"}},
    {"--svg is \"-\"; rule: a path", {"demo", "--svg=-"}},
    {"--input is \"-\"; rule: a path", {"run", "--input", "-"}},
    {"--weights is \"-\"; rule: a path", {"run", "--weights", "-"}},
    {"--output is \"stdout.txt\", to which standard output goes; rule: a result has a file of its "
     "own",
     {ARTICLE_RUN, "--output", "stdout.txt"}},
    {"--lse is \"w/../stderr.txt\", to which standard error goes; rule: ",
     {ARTICLE_RUN, "--output", "y.npy", "--lse", "w/../stderr.txt"}},
    {"--svg is \"./stdout.txt\", to which standard output goes", {"demo", "--svg", "./stdout.txt"}},
    {"--output is \"./w/a.b_O.npy\", which --weights names too; rule: a result replaces no weights",
     {"run", "--weights", "w/a.b_O.npy", "--heads", "2", "--input", "q.npy", "--output",
      "./w/a.b_O.npy"}},
    {"--lse is \"w\", which --weights names too", {ODD_RUN, "--lse", "w"}},
    {"--scale is \"nan\"", {"run", "--scale", "nan"}},
    {"--scale is \"inf\"", {"run", "--scale", "inf"}},
    {"--scale is \"1e39\"", {"run", "--scale", "1e39"}},
    {"--scale is \"\"", {"run", "--scale", ""}},
    {"--scale is \"1 \"", {"run", "--scale", "1 "}},
    {"--softcap is \"-1\"", {"run", "--softcap", "-1"}},
    {"--softcap is \"x\"", {"run", "--softcap", "x"}},
    {"--align is \"middle\"", {"run", "--align", "middle"}},
    {"--align is \"1,2\"", {"run", "--align", "1,2"}},
    {"--align is \"9223372036854775808\"", {"run", "--align", "9223372036854775808"}},
    {"--window is \"1\"; rule: two whole numbers of at least -1 with a comma between",
     {"run", "--window", "1"}},
    {"--window is \"1,2,3\"", {"run", "--window", "1,2,3"}},
    {"--window is \"-2,0\"", {"run", "--window", "-2,0"}},
    {"--window is \"1,\"", {"run", "--window", "1,"}},
    {"--window is \",1\"", {"run", "--window", ",1"}},
    {"--lengths is \"\"", {"run", "--lengths", ""}},
    {"--lengths is \"1,,2\"", {"run", "--lengths", "1,,2"}},
    {"--lengths is \"1,-1\"", {"run", "--lengths", "1,-1"}},
    {"--lengths is \"1 ,2\"", {"run", "--lengths", "1 ,2"}},
    {"--query-lengths is \"x\"", {"run", "--query-lengths", "x"}},
    {"--rope is \"half\"; rule: halves|interleaved", {"run", "--rope", "half"}},
    {"--rope is \"\"", {"run", "--rope="}},
    {"--rope-base is \"0\"; rule: a finite number greater than 0", {"run", "--rope-base", "0"}},
    {"--rope-base is \"-1\"", {"run", "--rope-base", "-1"}},
    {"--norm-epsilon is \"0\"", {"run", "--norm-epsilon", "0"}},
    {"--norm-epsilon is \"1e-60\"", {"run", "--norm-epsilon", "1e-60"}},
    {"--norm-epsilon is \"nan\"", {"run", "--norm-epsilon", "nan"}},
    {"--rotary is \"0\"", {"run", "--rotary", "0"}},
    {"--rotary is 3; rule: an even number",
     {ARTICLE_RUN, "--output", "y.npy", "--rope", "halves", "--rotary", "3"}},
    {"--rotary is given without --rope", {ARTICLE_RUN, "--output", "y.npy", "--rotary", "2"}},
    {"--rope-base is given without --rope", {ARTICLE_RUN, "--output", "y.npy", "--rope-base", "2"}},
    {"--rope-cos is given without --rope; rule",
     {ARTICLE_RUN, "--output", "y.npy", "--rope-cos", "c.npy", "--rope-sin", "s.npy"}},
    {"--rope-sin is given without --rope-cos; rule: both or none",
     {ARTICLE_RUN, "--output", "y.npy", "--rope", "halves", "--rope-sin", "s.npy"}},
    {"--rope-base is given with --rope-cos",
     {ARTICLE_RUN, "--output", "y.npy", "--rope", "halves", "--rope-cos", "c.npy", "--rope-sin",
      "s.npy", "--rope-base", "2"}},
    {"unexpected word \"a\\x0Ab\"", {"demo", "a\nb"}},
    {"unexpected word \"\\x1B[2J\\xC2\\x9B1m\\xFF\\xE2\\x80\\xAE\xC3\xA9\"",
     {"demo", "\x1B[2J\xC2\x9B"
              "1m\xFF\xE2\x80\xAE\xC3\xA9"}},
};

static void bad_command_lines(void **state) {
  const int before = test_files_in(".");
  (void)state;
  for (size_t i = 0; i < sizeof usage_rows / sizeof usage_rows[0]; i++) {
    test_note("row %zu", i);
    command_run_badly(2, usage_rows[i].fragment, usage_rows[i].words);
    assert_int_equal(test_files_in("."), before);
  }
}

/* ---- Bad data -------------------------------------------------------------------------------- */

static const struct {
  const char *fragment;
  const char *words[28];
} data_rows[] = {
    {"absent.npy does not exist",
     {"run", "--weights", "absent.npy", "--heads", "2", "--input", "q.npy", "--output", "y.npy"}},
    {"junk.txt seems to be text; rule: weights are a safetensors or GGUF file, or a folder of .npy "
     "files",
     {"run", "--weights", "junk.txt", "--heads", "2", "--input", "q.npy", "--output", "y.npy"}},
    {"absent does not exist",
     {"run", "--weights", "absent", "--heads", "2", "--input", "q.npy", "--output", "y.npy"}},
    {"q.npy seems to be a NumPy array (.npy); rule: weights are a safetensors or GGUF file, or a "
     "folder of",
     {"run", "--weights", "q.npy", "--heads", "2", "--input", "q.npy", "--output", "y.npy"}},
    {"w: a.W_K has shape (6, 10)",
     {"run", "--weights", "w", "--heads", "2", "--input", "q.npy", "--output", "y.npy"}},
    {"w holds no layer under the prefix \"\"", {ODD_INPUTS, "--weights", "w", "--prefix", ""}},
    {"cos.npy has shape (3, 4); rule: the shape of --rope-cos",
     {ODD_RUN, "--rope", "halves", "--rope-cos", "short_cos.npy", "--rope-sin", "cos.npy"}},
    {"cos.npy has shape (3, 4); rule: [positions][R/2] with the R of --rotary",
     {ODD_RUN, "--rope", "halves", "--rope-cos", "cos.npy", "--rope-sin", "cos.npy", "--rotary",
      "4"}},
    {"two.npy has shape (2,); rule: [positions][R/2]",
     {ODD_RUN, "--rope", "halves", "--rope-cos", "two.npy", "--rope-sin", "two.npy"}},
    {"absent.npy cannot be opened: ",
     {ODD_RUN, "--rope", "halves", "--rope-cos", "cos.npy", "--rope-sin", "absent.npy"}},
    {"W_Q has shape (8, 8), for H = 3",
     {"run", "--weights", article, "--heads", "3", "--input", article_x, "--output", "y.npy"}},
    {"absent.npy cannot be opened: ",
     {"run", "--weights", article, "--heads", "2", "--input", "absent.npy", "--output", "y.npy"}},
    {"junk.npy seems to be text; rule: an array is a .npy file",
     {"run", "--weights", article, "--heads", "2", "--input", "junk.npy", "--output", "y.npy"}},
    {"mask.npy holds the type \"u1\"",
     {"run", "--weights", article, "--heads", "2", "--input", "mask.npy", "--output", "y.npy"}},
    {"slopes.npy has shape (4,); rule: [L][Eq] or [B][L][Eq] with the weights' Eq = 8",
     {"run", "--weights", article, "--heads", "2", "--input", "slopes.npy", "--output", "y.npy"}},
    {"k.npy has shape (2, 6, 6); rule: [L][Eq]",
     {"run", "--weights", article, "--heads", "2", "--input", "k.npy", "--output", "y.npy"}},
    {"rule: the batch dimension of --input", {ARTICLE_RUN, "--output", "y.npy", "--key", "q.npy"}},
    {"v.npy has shape (2, 6, 5); rule: [L][Ek]",
     {ARTICLE_RUN, "--output", "y.npy", "--key", "v.npy"}},
    {"k.npy has shape (2, 6, 6); rule: [L][Ev]",
     {"run", "--weights", "w", "--prefix", "a.", "--heads", "4", "--kv-heads", "2", "--input",
      "q.npy", "--key", "k.npy", "--value", "k.npy", "--output", "y.npy"}},
    {"short.npy has shape (2, 3, 5); rule: as many rows as --key",
     {"run", "--weights", "w", "--prefix", "a.", "--heads", "4", "--kv-heads", "2", "--input",
      "q.npy", "--key", "k.npy", "--value", "short.npy", "--output", "y.npy"}},
    {"key", /* absent, and Ek is not Eq */
     {"run", "--weights", "w", "--prefix", "a.", "--heads", "4", "--kv-heads", "2", "--input",
      "q.npy", "--output", "y.npy"}},
    {"bias.npy holds the type \"f4\"; rule: bool or uint8", {ODD_RUN, "--attend", "bias.npy"}},
    {"mask.npy holds the type \"u1\"; rule: float16, float32 or float64",
     {ODD_RUN, "--bias", "mask.npy"}},
    {"attend", {ODD_RUN, "--attend", "narrow.npy"}},
    {"bias", {ODD_RUN, "--bias", "slopes.npy"}},
    {"deep.npy has shape (1, 1, 1, 1, 6)", {ODD_RUN, "--attend", "deep.npy"}},
    {"scalar.npy has shape ()", {ODD_RUN, "--attend", "scalar.npy"}},
    {"two.npy has shape (2,); rule: [H]", {ODD_RUN, "--alibi", "two.npy"}},
    {"bias.npy has shape (4, 5, 6); rule: [H]", {ODD_RUN, "--sinks", "bias.npy"}},
    {"alibi_slopes", {ODD_RUN, "--alibi", "nan.npy"}},
    {"absent/p.npy cannot be written: ", {ODD_RUN, "--attn-weights", "absent/p.npy"}},
    {"absent/p.svg cannot be written: ", {ODD_RUN, "--svg", "absent/p.svg"}},
    {"absent/p.svg cannot be written: ", {"demo", "--svg", "absent/p.svg"}},
    {"p.svg would show 1 x 2 maps of 513 x 513 cells; rule: at least one, at most 512 x 512",
     {"run", "--weights", article, "--heads", "2", "--input", "long.npy", "--output", "y.npy",
      "--svg", "p.svg"}},
    {"p.svg would show 1 x 2 maps of 0 x 0 cells",
     {"run", "--weights", article, "--heads", "2", "--input", "none.npy", "--output", "y.npy",
      "--svg", "p.svg"}},
    {"attend has 1 rows and 6 columns; rule: 1 or Lq rows and Lk columns, with Lq = Lk = 7",
     {ARTICLE_STEPS, "--attend", "six.npy"}},
    {"bias has 2 rows and 7 columns; rule: 1 or Lq", {ARTICLE_STEPS, "--bias", "two_rows.npy"}},
    {"attend.heads is 3; rule: 1 or 2", {ARTICLE_STEPS, "--attend", "heads.npy"}},
    {"head sizes 4 and 4; rule: whole blocks of Q8_0", {ARTICLE_STEPS, "--cache-type", "q8_0"}},
    {"page_tokens is 24; rule: 0 or a power of two", {ARTICLE_STEPS, "--cache-pages", "24"}},
    {"page_tokens is 8; rule: 0 or a power of two", {ARTICLE_STEPS, "--cache-pages", "8"}},
    {"absent does not exist", {"convert", "absent", "out.st", "--type", "f16", "--heads", "2"}},
    {"OUT: absent/out.st cannot be written: ",
     {"convert", "w", "absent/out.st", "--type", "f16", "--heads", "4"}},
    {"OUT: /dev/null is not a regular file",
     {"convert", "w", "/dev/null", "--type", "f16", "--heads", "4"}},
    {"w: a.W_K has shape (6, 10)", {"convert", "w", "y.npy", "--type", "f16", "--heads", "2"}},
    {"w holds no layer under the prefix \"b.\"",
     {"convert", "w", "y.npy", "--type", "f16", "--heads", "2", "--prefix", "b."}},
};

static void put_bad_files(void) {
  static const uint8_t ones[LK] = {1, 1, 1, 1, 1, 1};
  static float numbers[513 * 8];
  static const uint8_t many[3 * 7] = {1};
  test_random random;
  test_random_seed(&random, 3);
  test_put_file("junk.npy", "junk", 4);
  test_put_file("junk.txt", "junk", 4);
  PUT(&random, "long.npy", numbers, 2, 513, 8);
  PUT(&random, "none.npy", numbers, 2, 0, 8);
  PUT(&random, "two_rows.npy", numbers, 2, 2, 7);
  inputs_put_mask("six.npy", ones, 6, "(6,)");
  inputs_put_mask("heads.npy", many, sizeof many, "(3, 1, 7)");
  PUT(&random, "short.npy", numbers, 3, B, 3, EV);
  PUT(&random, "two.npy", numbers, 1, 2);
  PUT(&random, "cos.npy", numbers, 2, 3, 4);
  PUT(&random, "short_cos.npy", numbers, 2, 2, 4);
  inputs_put_mask("narrow.npy", ones, 5, "(5,)");
  inputs_put_mask("deep.npy", ones, 6, "(1, 1, 1, 1, 6)");
  inputs_put_mask("scalar.npy", ones, 1, "()");
  static const int64_t shape[1] = {H};
  const float bad_slopes[H] = {1, NAN, 1, 1};
  assert_int_equal(mha_npy_write("nan.npy", 1, shape, bad_slopes, NULL), MHA_OK);
}

/* An output that exists already keeps every byte, and no file appears. */
static void bad_data(void **state) {
  static const int64_t shape[1] = {2};
  static const float old[2] = {1, 2};
  (void)state;
  put_bad_files();
  assert_int_equal(mha_npy_write("y.npy", 1, shape, old, NULL), MHA_OK);
  const int before = test_files_in(".");
  for (size_t i = 0; i < sizeof data_rows / sizeof data_rows[0]; i++) {
    test_note("row %zu: %s", i, data_rows[i].fragment);
    command_run_badly(1, data_rows[i].fragment, data_rows[i].words);
    assert_int_equal(test_files_in("."), before);
  }
  command_same_bits("y.npy", 1, shape, old);
}

/* ---- Help and version ------------------------------------------------------------------------ */

static void help_names_every_option(void **state) {
  static const char *const names[] = {"--weights FILE|DIR",
                                      "--prefix P",
                                      "--heads H",
                                      "--kv-heads G",
                                      "--keep-type",
                                      "--norm-epsilon E",
                                      "--rope halves|interleaved",
                                      "--rope-base B",
                                      "--rotary R",
                                      "--rope-cos C.npy",
                                      "--rope-sin S.npy",
                                      "--input X.npy",
                                      "--key K.npy",
                                      "--value V.npy",
                                      "--output Y.npy",
                                      "--align top-left|bottom-right|N",
                                      "--causal",
                                      "--window L,R",
                                      "--lengths N,...",
                                      "--query-lengths N,...",
                                      "--attend M.npy",
                                      "--bias A.npy",
                                      "--scale S",
                                      "--softcap C",
                                      "--alibi S.npy",
                                      "--sinks S.npy",
                                      "--dropout P",
                                      "--seed N",
                                      "--call N",
                                      "--attn-weights P.npy",
                                      "--stage scaled|capped|final|weights",
                                      "--lse F.npy",
                                      "--svg FILE",
                                      "--labels TEXT",
                                      "--backward DY.npy",
                                      "--gradients FOLDER",
                                      "--steps",
                                      "--cache-type f32|f16|bf16|q8_0",
                                      "--cache-pages T",
                                      "--trace",
                                      "--threads N",
                                      "--help"};
  (void)state;
  for (int whole = 0; whole < 2; whole++) {
    if (whole)
      RUN_WELL("--help");
    else
      RUN_WELL("run", "--help");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
      if (!strstr(command_out, names[i]))
        test_failed("no %s in\n%s", names[i], command_out);
    size_t longest = 0;
    for (const char *line = strtok(command_out, "\n"); line; line = strtok(NULL, "\n"))
      longest = strlen(line) > longest ? strlen(line) : longest;
    assert_in_range(longest, 40, 80);
  }
  RUN_WELL("inspect", "--help");
  assert_non_null(strstr(command_out, "mha inspect FILE|DIR [options]"));
  assert_non_null(strstr(command_out, "  FILE|DIR  (required)\n"));
  assert_non_null(strstr(command_out, "--prefix P"));
  assert_null(strstr(command_out, "--heads"));
  RUN_WELL("convert", "--help");
  assert_non_null(strstr(command_out, "mha convert FILE|DIR OUT [options]"));
  assert_non_null(strstr(command_out, "  OUT  (required)\n"));
  assert_non_null(strstr(command_out, "  --type f32|f16|bf16  (required)\n"));
  assert_null(strstr(command_out, "--weights"));
  RUN_WELL("demo", "--help");
  assert_non_null(strstr(command_out, "--trace"));
  assert_null(strstr(command_out, "--weights"));
}

static void version_tells_release_and_blas(void **state) {
  (void)state;
  RUN_WELL("--version");
  assert_memory_equal(command_out, "mha " MHA_VERSION_STRING "\n", sizeof MHA_VERSION_STRING + 4);
  assert_non_null(strstr(command_out, "\nblas: "));
  assert_non_null(strstr(command_out, "\ninstruction_set: "));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(inspect_shows_tensors_and_layers),
      cmocka_unit_test(inspect_shows_folders),
      cmocka_unit_test(inspect_refuses_bad_files),
      cmocka_unit_test(hostile_text_is_shown_harmless),
      cmocka_unit_test(bad_command_lines),
      cmocka_unit_test(bad_data),
      cmocka_unit_test(help_names_every_option),
      cmocka_unit_test(version_tells_release_and_blas),
  };
  return cmocka_run_group_tests(tests, command_enter_folder, command_leave_folder);
}
