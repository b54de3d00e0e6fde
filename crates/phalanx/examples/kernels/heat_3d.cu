// A step of heat_3d_gpu: heat flows between the cells of a box and their neighbors.

// A box of cells: where it begins, and its sizes.
struct Cells {
    int begin[3];
    int sizes[3];
};

extern "C" __global__ void step(const double* heat, double* next, int rows, int columns, Cells box, double flow) {
    const int z = blockIdx.x * blockDim.x + threadIdx.x;
    const int y = blockIdx.y * blockDim.y + threadIdx.y;
    const int x = blockIdx.z;
    if (z >= box.sizes[2] || y >= box.sizes[1]) return;
    const long long plane = (long long)rows * columns;
    const long long cell = (box.begin[0] + x) * plane + (long long)(box.begin[1] + y) * columns + box.begin[2] + z;
    // In the order of the host, so that both round alike.
    const double around = (heat[cell - plane] + heat[cell + plane]) + (heat[cell - columns] + heat[cell + columns]) +
        (heat[cell - 1] + heat[cell + 1]);
    next[cell] = heat[cell] + flow * (around - 6.0 * heat[cell]);
}
