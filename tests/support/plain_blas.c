/* The routines that the library takes from a BLAS, as plain loops. */
#include <cblas.h>

/* Element (r, c) of a row-major matrix that may be stored transposed. */
static float element(const float *matrix, int ld, enum CBLAS_TRANSPOSE transposed, int r, int c) {
  return transposed == CblasNoTrans ? matrix[(long)r * ld + c] : matrix[(long)c * ld + r];
}

void cblas_sgemm(enum CBLAS_ORDER layout, enum CBLAS_TRANSPOSE a_transposed,
                 enum CBLAS_TRANSPOSE b_transposed, int m, int n, int k, float alpha,
                 const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc) {
  (void)layout; /* always row-major */
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      float sum = 0.0f;
      for (int p = 0; p < k; p++)
        sum += element(a, lda, a_transposed, i, p) * element(b, ldb, b_transposed, p, j);
      float *to = c + (long)i * ldc + j;
      *to = alpha * sum + (beta == 0.0f ? 0.0f : beta * *to);
    }
}

void cblas_sgemv(enum CBLAS_ORDER layout, enum CBLAS_TRANSPOSE transposed, int m, int n,
                 float alpha, const float *a, int lda, const float *x, int x_step, float beta,
                 float *y, int y_step) {
  const int rows = transposed == CblasNoTrans ? m : n;
  const int columns = transposed == CblasNoTrans ? n : m;
  (void)layout;
  for (int i = 0; i < rows; i++) {
    float sum = 0.0f;
    for (int p = 0; p < columns; p++)
      sum += element(a, lda, transposed, i, p) * x[(long)p * x_step];
    float *to = y + (long)i * y_step;
    *to = alpha * sum + (beta == 0.0f ? 0.0f : beta * *to);
  }
}

float cblas_sdot(int n, const float *x, int x_step, const float *y, int y_step) {
  float sum = 0.0f;
  for (int i = 0; i < n; i++)
    sum += x[(long)i * x_step] * y[(long)i * y_step];
  return sum;
}
