/* The families of cases: a folder each, and the function that puts its cases to the library. */
#ifndef MHA_TESTS_CONFORMANCE_FAMILIES_H
#define MHA_TESTS_CONFORMANCE_FAMILIES_H

#include "case.h"

/* Runs an opened case and settles its outcome; returns whether it passed. */
typedef bool conf_translator(conf_case *c, mha_context *context);

/* ONNX's operator Attention, and FlexAttention reduced to the same inputs. */
conf_translator conf_translate_onnx;
/* ONNX Runtime's own operators Attention and MultiHeadAttention. */
conf_translator conf_translate_ort;
/* Layers with all four projections. */
conf_translator conf_translate_projection;

#endif
