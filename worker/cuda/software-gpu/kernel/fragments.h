// nvcuda::wmma: matrices spread over a warp in a way that only the GPU knows.
//
// Here element e of a matrix, row after row, lies with lane e / num_elements. The operations take the
// matrices of all lanes together, multiply them in float32 (integers in int32), and round to the
// accumulator's type.
#pragma once

#include <cstdint>
#include <type_traits>

#include "here.h"
#include "matrices.h"

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
namespace precision {
struct tf32;
}
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
    static constexpr int ROWS = std::is_same_v<Use, matrix_b> ? K : M;
    static constexpr int COLUMNS = std::is_same_v<Use, matrix_a> ? K : N;
    static constexpr int num_elements = ROWS * COLUMNS / gpu::LANES;
    using Element = std::conditional_t<std::is_same_v<T, precision::tf32>, float, T>;

    Element x[num_elements];
};

// A matrix that lies in memory, and a lane's part of it.
template <class Fragment>
struct Transfer {
    Fragment* fragment;
    typename Fragment::Element* start;
    unsigned stride;
    bool by_rows;
};

template <gpu::Direction DIRECTION, class Fragment>
inline void transfer(Transfer<Fragment>* const* lanes) {
    const Transfer<Fragment>& all = *lanes[0];
    constexpr int COUNT = Fragment::num_elements;
    constexpr size_t BYTES = sizeof(typename Fragment::Element);
    gpu::prefer(uintptr_t(all.start) % 32 == 0, "wmma: a matrix does not begin at a multiple of 32 bytes");
    gpu::prefer(all.stride * BYTES % 16 == 0, "wmma: rows are not a multiple of 16 bytes apart");
    for (int lane = 0; lane < gpu::LANES; lane++) {
        const Transfer<Fragment>& mine = *lanes[lane];
        gpu::demand(mine.start == all.start && mine.stride == all.stride,
                     "wmma: lanes differ in the matrix");
        for (int i = 0; i < COUNT; i++) {
            const int element = lane * COUNT + i;
            const size_t row = element / Fragment::COLUMNS, column = element % Fragment::COLUMNS;
            auto& place = all.start[all.by_rows ? row * all.stride + column : column * all.stride + row];
            if (DIRECTION == gpu::Direction::load) {
                mine.fragment->x[i] = place;
            } else {
                place = mine.fragment->x[i];
            }
        }
    }
}

template <gpu::Direction DIRECTION, class Fragment>
inline void transfer_together(Fragment& fragment, const typename Fragment::Element* start, unsigned stride,
                              bool by_rows) {
    using Element = typename Fragment::Element;
    Transfer<Fragment> mine{&fragment, const_cast<Element*>(start), stride, by_rows};
    gpu::together<transfer<DIRECTION, Fragment>>(mine);
}

template <class Use, int M, int N, int K, class T, class Layout>
inline void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& into,
                             const typename fragment<Use, M, N, K, T, Layout>::Element* start,
                             unsigned stride) {
    constexpr bool BY_ROWS = std::is_same_v<Layout, row_major>;
    transfer_together<gpu::Direction::load>(into, start, stride, BY_ROWS);
}

template <int M, int N, int K, class T>
inline void load_matrix_sync(fragment<accumulator, M, N, K, T>& into, const T* start, unsigned stride,
                             layout_t layout) {
    transfer_together<gpu::Direction::load>(into, start, stride, layout == mem_row_major);
}

template <int M, int N, int K, class T>
inline void store_matrix_sync(T* start, const fragment<accumulator, M, N, K, T>& from, unsigned stride,
                              layout_t layout) {
    auto& fragment = const_cast<wmma::fragment<accumulator, M, N, K, T>&>(from);
    transfer_together<gpu::Direction::store>(fragment, start, stride, layout == mem_row_major);
}

template <class Use, int M, int N, int K, class T, class Layout, class Value>
inline void fill_fragment(fragment<Use, M, N, K, T, Layout>& filled, Value value) {
    for (auto& element : filled.x) {
        element = typename fragment<Use, M, N, K, T, Layout>::Element(value);
    }
}

template <class D, class A, class B, class C>
struct Product {
    D* d;
    const A* a;
    const B* b;
    const C* c;
};

template <class T, class Sum, class Element>
inline Sum factor(Element value) {
    if constexpr (std::is_same_v<T, precision::tf32>) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        return gpu::TensorFloat::cut(bits);
    } else {
        return Sum(value);
    }
}

template <class T, class D, class A, class B, class C>
inline void multiply(Product<D, A, B, C>* const* lanes) {
    constexpr int ROWS = D::ROWS, COLUMNS = D::COLUMNS, DEPTH = A::COLUMNS;
    using Sum = std::conditional_t<std::is_integral_v<typename D::Element>, int, float>;
    Sum a[ROWS][DEPTH], b[DEPTH][COLUMNS], d[ROWS][COLUMNS];
    for (int lane = 0; lane < gpu::LANES; lane++) {
        for (int i = 0; i < A::num_elements; i++) {
            (&a[0][0])[lane * A::num_elements + i] = factor<T, Sum>(lanes[lane]->a->x[i]);
        }
        for (int i = 0; i < B::num_elements; i++) {
            (&b[0][0])[lane * B::num_elements + i] = factor<T, Sum>(lanes[lane]->b->x[i]);
        }
        for (int i = 0; i < C::num_elements; i++) {
            (&d[0][0])[lane * C::num_elements + i] = Sum(lanes[lane]->c->x[i]);
        }
    }
    for (int row = 0; row < ROWS; row++) {
        for (int k = 0; k < DEPTH; k++) {
            for (int column = 0; column < COLUMNS; column++) {
                d[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for (int lane = 0; lane < gpu::LANES; lane++) {
        for (int i = 0; i < D::num_elements; i++) {
            lanes[lane]->d->x[i] = typename D::Element((&d[0][0])[lane * D::num_elements + i]);
        }
    }
}

template <int M, int N, int K, class T, class RowsOrColumnsA, class RowsOrColumnsB, class To, class From>
inline void mma_sync(fragment<accumulator, M, N, K, To>& d,
                     const fragment<matrix_a, M, N, K, T, RowsOrColumnsA>& a,
                     const fragment<matrix_b, M, N, K, T, RowsOrColumnsB>& b,
                     const fragment<accumulator, M, N, K, From>& c) {
    using A = fragment<matrix_a, M, N, K, T, RowsOrColumnsA>;
    using B = fragment<matrix_b, M, N, K, T, RowsOrColumnsB>;
    using C = fragment<accumulator, M, N, K, From>;
    using D = fragment<accumulator, M, N, K, To>;
    Product<D, A, B, C> mine{&d, &a, &b, &c};
    gpu::together<multiply<T, D, A, B, C>>(mine);
}

inline float __float_to_tf32(float value) { return gpu::TensorFloat::nearest(value); }

}  // namespace nvcuda::wmma
