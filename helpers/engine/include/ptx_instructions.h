// The functions that inline PTX becomes: the Python package ptx/ rewrites each asm statement into calls of them.
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
