// The instructions that asm statements may hold. The package ptx/ beside the compiler rewrites a statement into calls
// of what stands here.
#pragma once
#include "ptx/operands.h"

#include "ptx/control.h"
#include "ptx/conversions.h"
#include "ptx/floats.h"
#include "ptx/functions.h"
#include "ptx/integers.h"
#include "ptx/matrices.h"
#include "ptx/mbarriers.h"
#include "ptx/memory.h"
#include "ptx/warpgroups.h"
#include "ptx/warps.h"
