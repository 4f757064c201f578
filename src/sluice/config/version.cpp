// SPDX-License-Identifier: Apache-2.0
// SLUICE_VERSION and SLUICE_GIT_HASH are defined for this file alone, so that a new commit compiles nothing else.
#include <string>

#include "sluice/config/app.h"

namespace sluice {

std::string version() { return SLUICE_VERSION " (" SLUICE_GIT_HASH ")"; }

}  // namespace sluice
