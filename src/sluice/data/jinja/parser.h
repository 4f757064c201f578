// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "sluice/data/jinja/ast.h"

namespace sluice::jinja {

// The statements of a template. Throws Problem with the line in front, e.g. "7: 'for' is not closed by 'endfor'".
Block parse(std::string_view source);

}  // namespace sluice::jinja
