//! Parts of training among several ranks, against one rank and against values worked out by hand.

mod attention;
mod buckets;
mod checkpoint;
mod compress;
mod device;
mod elastic;
mod expert;
mod mesh;
mod norm;
mod outer;
mod pipeline;
mod replicas;
mod report;
mod sampler;
mod sharding;
mod tensor;
