/* A file of weights as an object: its tensors and its layers, for whoever loads from it. */
#ifndef MHA_SRC_FILES_FILE_H
#define MHA_SRC_FILES_FILE_H

#include "names.h"

#include <stdatomic.h>

/* One block of memory: the object, its path, the layers, their texts. */
struct mha_file {
  atomic_int references; /* the caller's, and one for each layer that uses the numbers */
  mha_allocator allocator;
  size_t bytes;     /* of the block */
  const char *path; /* for messages */
  mha_raw_tensors tensors;
  int64_t n_layers;
  mha_layer_names *layers;
  const char **prefixes; /* zero-terminated, of each layer */
  const char **missing;  /* what each layer lacks, or "" */
  mha_release_function *release;
  void *release_user;
};

/* Adds a reference; mha_file_destroy gives it back. */
mha_file *mha_file_retain(mha_file *file);

#endif
