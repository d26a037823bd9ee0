/* arithmetic <library>...: loads each library into this program, and prints what is wrong with it:
 * an exp that differs in a bit from that of the first library, or a program that flushes
 * subnormals from then on. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { N = 8700 };

static int flushes(void) {
  volatile float tiny = 1e-40f;
  volatile float half = tiny * 0.5f;
  return half == 0.0f;
}

/* exp(0), exp(-0.01), … */
static int compute(const char *path, float *results) {
  void *library = dlopen(path, RTLD_NOW);
  void *address = library ? dlsym(library, "mha_exp") : NULL;
  float (*exponential)(float) = NULL;
  if (!address) {
    printf("%s\n", dlerror());
    return 0;
  }
  /* ISO C has no conversion from an object pointer to a function pointer. */
  memcpy(&exponential, &address, sizeof address);
  for (int i = 0; i < N; i++)
    results[i] = exponential((float)i * -0.01f);
  return 1;
}

int main(int argc, char **argv) {
  static float first[N];
  static float results[N];
  int faults = 0;
  for (int i = 1; i < argc; i++) {
    if (!compute(argv[i], i == 1 ? first : results)) {
      faults++;
    } else if (i > 1 && memcmp(first, results, sizeof first) != 0) {
      printf("%s: exp differs\n", argv[i]);
      faults++;
    }
    if (flushes()) {
      printf("%s: the program flushes subnormals to 0\n", argv[i]);
      return 1; /* and would with any further library */
    }
  }
  return argc < 2 || faults > 0;
}
