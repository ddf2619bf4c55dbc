// The GoogleTest fixture for tests on the fake accelerator: installed before, as new after,
// whatever the test did to it.
#pragma once

#include "fake_accelerator.h"

#include <gtest/gtest.h>

namespace fake_accelerator {

class Fixture : public testing::Test {
 protected:
  void SetUp() override { install(); }
  void TearDown() override { reset(); }
};

}  // namespace fake_accelerator
