/* The numbers of the article's example, for the command's demo. */
#ifndef MHA_SRC_CLI_ARTICLE_H
#define MHA_SRC_CLI_ARTICLE_H

enum { MHA_ARTICLE_LENGTH = 7, MHA_ARTICLE_WIDTH = 8, MHA_ARTICLE_HEADS = 2 };

extern const float mha_article_x[MHA_ARTICLE_LENGTH * MHA_ARTICLE_WIDTH]; /* [L][E] */
extern const float mha_article_wq[MHA_ARTICLE_WIDTH * MHA_ARTICLE_WIDTH]; /* [in][out], as below */
extern const float mha_article_wk[MHA_ARTICLE_WIDTH * MHA_ARTICLE_WIDTH];
extern const float mha_article_wv[MHA_ARTICLE_WIDTH * MHA_ARTICLE_WIDTH];
extern const float mha_article_wo[MHA_ARTICLE_WIDTH * MHA_ARTICLE_WIDTH];

#endif
