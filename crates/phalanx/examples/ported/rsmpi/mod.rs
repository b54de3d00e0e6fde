//! Examples of rsmpi.

pub mod all_gather;
pub mod all_to_all;
pub mod barrier;
pub mod broadcast;
pub mod cartesian;
pub mod comm_name;
pub mod complex_datatype;
pub mod duplicate;
pub mod gather_varcount;
pub mod group;
pub mod immediate;
pub mod immediate_multiple_requests;
pub mod immediate_reduce;
pub mod readme;
pub mod ready_send;
pub mod reduce;
pub mod scan;
pub mod scatter_varcount;
pub mod send_receive;
pub mod split;
pub mod vector;
pub mod wait_any;
