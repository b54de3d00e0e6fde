//! Finding the CUDA driver. Its interface is in cudarc.

use crate::Search;

/// Where the driver's library may be. Once it is loaded, cudarc finds it by its name.
pub const DRIVER: Search = Search {
    name: "the CUDA driver",
    files: &["libcuda.so.1", "libcuda.so"],
    variable: "PHALANX_CUDA_LIB",
    homes: &[],
    wheels: &[],
    global: false,
};
