//! LeRobot data sets, from files to micro-batches.
