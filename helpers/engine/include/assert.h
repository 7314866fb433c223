// Device-side assert: the launch fails with the expression and its line. No include guard, as in C.
#undef assert
#ifdef NDEBUG
#define assert(expression) ((void)0)
#else
#define assert(expression) ((expression) ? (void)0 : engine_fail("assertion failed: " #expression, __FILE__, __LINE__))
#endif
