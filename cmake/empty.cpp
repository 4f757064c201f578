// SPDX-License-Identifier: Apache-2.0
// A library must have a source; this one stands in where all objects come from elsewhere.
