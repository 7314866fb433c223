// What blocks of a cluster need of each other.
#include <cooperative_groups.h>
namespace cg = cooperative_groups;
