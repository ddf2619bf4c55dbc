// Whether an error's text has all that it must name.
#pragma once

#include <gtest/gtest.h>

#include <string_view>

namespace tenure::pipeline {

template <class... Parts>
::testing::AssertionResult says(std::string_view said, const Parts&... parts) {
  for (const std::string_view part : {std::string_view(parts)...}) {
    if (said.find(part) == std::string_view::npos) {
      return ::testing::AssertionFailure() << "'" << said << "' has no '" << part << "'";
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace tenure::pipeline
