//! What a build without the feature `buckets` has instead.

/// Addresses stay unread: a user who names one learns what to build.
pub fn install() {}
