; One or a few rows of inputs times a matrix of weights [outs, ins] that lies row by row, as LLVM's assembly.
;
; A decode step reads every weight once, so these are as fast as memory where arithmetic keeps up. Vectors are of cache
; lines, and LLVM cuts them into the registers that the processor has. Sums go over lanes in a fixed order that depends on
; neither the number of rows nor that of threads. Float32 throughout: bfloat16 inputs are widened and outputs rounded here.
;
; `shard.linear.native` compiles it, and says what the arguments of the three entries are.

%Work = type {
  ptr,  ; 0 weight: bfloat16, int8, or two of four bits in a byte
  ptr,  ; 1 scales: float32 of each row (int8), a pair of bfloat16 of each group (int4)
  ptr,  ; 2 inputs: float32 [rows, ins], or what they were quantized to, int16
  ptr,  ; 3 input scales: float32 [rows]
  ptr,  ; 4 sums of the inputs of each group: float32 [rows, groups, 8]
  ptr,  ; 5 outputs [rows, outs]
  i64,  ; 6 outs
  i64,  ; 7 ins
  i64,  ; 8 rows
  i1    ; 9 whether outputs are bfloat16; else float32
}

declare void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, i32 immarg)
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)
declare float @llvm.fabs.f32(float)
declare float @llvm.maximum.f32(float, float)
declare float @llvm.rint.f32(float)
declare i16 @llvm.fptosi.sat.i16.f32(float)
declare float @llvm.fmuladd.f32(float, float, float)
declare <32 x float> @llvm.fmuladd.v32f32(<32 x float>, <32 x float>, <32 x float>)
declare <16 x float> @llvm.fmuladd.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare <8 x float> @llvm.fmuladd.v8f32(<8 x float>, <8 x float>, <8 x float>)
declare float @llvm.vector.reduce.fadd.v32f32(float, <32 x float>)
declare float @llvm.vector.reduce.fadd.v8f32(float, <8 x float>)
declare i32 @llvm.vector.reduce.add.v64i32(<64 x i32>)

; The threads are torch's own: its OpenMP runtime, or in its absence the caller alone.
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()

; ---------------------------------------------------------------------------------------------------------- elements

define internal float @read_bf16(ptr %from, i64 %i) alwaysinline {
  %at = getelementptr i16, ptr %from, i64 %i
  %short = load i16, ptr %at, align 2
  %wide = zext i16 %short to i32
  %bits = shl i32 %wide, 16
  %value = bitcast i32 %bits to float
  ret float %value
}

; Rounded to nearest, ties to even; what is not a number stays so.
define internal i16 @to_bf16(float %value) alwaysinline {
  %bits = bitcast float %value to i32
  %low = lshr i32 %bits, 16
  %odd = and i32 %low, 1
  %half = add i32 %odd, 32767
  %rounded = add i32 %bits, %half
  %is_nan = fcmp uno float %value, %value
  %chosen = select i1 %is_nan, i32 2143289344, i32 %rounded
  %high = lshr i32 %chosen, 16
  %short = trunc i32 %high to i16
  ret i16 %short
}

define internal void @widen(ptr noalias %from, ptr noalias %to, i64 %count) {
entry:
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %i.next, %each ]
  %value = call float @read_bf16(ptr %from, i64 %i)
  %at = getelementptr float, ptr %to, i64 %i
  store float %value, ptr %at, align 4
  %i.next = add nuw i64 %i, 1
  %done = icmp eq i64 %i.next, %count
  br i1 %done, label %end, label %each
end:
  ret void
}

define internal void @write_output(ptr %work, i64 %row, i64 %out, float %value) alwaysinline {
  %outs.at = getelementptr %Work, ptr %work, i64 0, i32 6
  %outs = load i64, ptr %outs.at
  %outputs.at = getelementptr %Work, ptr %work, i64 0, i32 5
  %outputs = load ptr, ptr %outputs.at
  %is_bf16.at = getelementptr %Work, ptr %work, i64 0, i32 9
  %is_bf16 = load i1, ptr %is_bf16.at
  %before = mul i64 %row, %outs
  %index = add i64 %before, %out
  br i1 %is_bf16, label %bf16, label %f32
bf16:
  %short = call i16 @to_bf16(float %value)
  %short.at = getelementptr i16, ptr %outputs, i64 %index
  store i16 %short, ptr %short.at, align 2
  ret void
f32:
  %at = getelementptr float, ptr %outputs, i64 %index
  store float %value, ptr %at, align 4
  ret void
}

; Inputs as whole numbers of -levels … levels; gives the scale that brings them back. A row with an infinity, or with what
; is not a number, has no such scale: it gives NaN, and with it every output of the row is NaN.
define internal float @quantize(ptr noalias %from, ptr noalias %to, i64 %count, float %levels) {
entry:
  br label %largest.each
largest.each:
  %j = phi i64 [ 0, %entry ], [ %j.next, %largest.each ]
  %largest = phi float [ 0x39B4484C00000000, %entry ], [ %largest.next, %largest.each ]  ; 1e-30, not to divide by zero
  %j.at = getelementptr float, ptr %from, i64 %j
  %j.value = load float, ptr %j.at, align 4
  %size = call float @llvm.fabs.f32(float %j.value)
  %largest.next = call reassoc float @llvm.maximum.f32(float %largest, float %size)
  %j.next = add nuw i64 %j, 1
  %j.done = icmp eq i64 %j.next, %count
  br i1 %j.done, label %found, label %largest.each
found:
  %is_finite = fcmp olt float %largest.next, 0x7FF0000000000000
  %largest.or_nan = select i1 %is_finite, float %largest.next, float 0x7FF8000000000000
  %scale = fdiv float %largest.or_nan, %levels
  %inverse = fdiv float %levels, %largest.or_nan
  br label %each
each:
  %i = phi i64 [ 0, %found ], [ %i.next, %each ]
  %from.at = getelementptr float, ptr %from, i64 %i
  %value = load float, ptr %from.at, align 4
  %scaled = fmul float %value, %inverse
  %whole = call float @llvm.rint.f32(float %scaled)
  %short = call i16 @llvm.fptosi.sat.i16.f32(float %whole)
  %to.at = getelementptr i16, ptr %to, i64 %i
  store i16 %short, ptr %to.at, align 2
  %i.next = add nuw i64 %i, 1
  %done = icmp eq i64 %i.next, %count
  br i1 %done, label %end, label %each
end:
  ret float %scale
}

; -------------------------------------------------------------------------------------------------------- one output

define internal float @dot_bf16(ptr %weights, ptr %inputs, i64 %count) noinline {
entry:
  %whole = and i64 %count, -32
  br label %block
block:
  %i = phi i64 [ 0, %entry ], [ %i.next, %block.body ]
  %sums = phi <32 x float> [ zeroinitializer, %entry ], [ %sums.next, %block.body ]
  %block.more = icmp ult i64 %i, %whole
  br i1 %block.more, label %block.body, label %reduce
block.body:
  %w.at = getelementptr i16, ptr %weights, i64 %i
  %w.ahead = getelementptr i8, ptr %w.at, i64 2048
  call void @llvm.prefetch.p0(ptr %w.ahead, i32 0, i32 3, i32 1)
  %w.short = load <32 x i16>, ptr %w.at, align 2
  %w.wide = zext <32 x i16> %w.short to <32 x i32>
  %w.bits = shl <32 x i32> %w.wide, splat (i32 16)
  %w = bitcast <32 x i32> %w.bits to <32 x float>
  %x.at = getelementptr float, ptr %inputs, i64 %i
  %x = load <32 x float>, ptr %x.at, align 4
  %sums.next = call <32 x float> @llvm.fmuladd.v32f32(<32 x float> %w, <32 x float> %x, <32 x float> %sums)
  %i.next = add nuw i64 %i, 32
  br label %block
reduce:
  %sum = call reassoc float @llvm.vector.reduce.fadd.v32f32(float 0.0, <32 x float> %sums)
  br label %rest
rest:
  %k = phi i64 [ %whole, %reduce ], [ %k.next, %rest.body ]
  %total = phi float [ %sum, %reduce ], [ %total.next, %rest.body ]
  %rest.more = icmp ult i64 %k, %count
  br i1 %rest.more, label %rest.body, label %end
rest.body:
  %k.w = call float @read_bf16(ptr %weights, i64 %k)
  %k.at = getelementptr float, ptr %inputs, i64 %k
  %k.x = load float, ptr %k.at, align 4
  %total.next = call float @llvm.fmuladd.f32(float %k.w, float %k.x, float %total)
  %k.next = add nuw i64 %k, 1
  br label %rest
end:
  ret float %total
}

; Three rows of weights times four of inputs, whose sums stay in registers; gives [3, 4], and room for a fourth.
define internal void @tile_bf16(ptr %w0, ptr %x0, i64 %count, ptr %to) noinline {
entry:
  %whole = and i64 %count, -8
  %rest = sub i64 %count, %whole
  %w1 = getelementptr i16, ptr %w0, i64 %count
  %w2 = getelementptr i16, ptr %w1, i64 %count
  %x1 = getelementptr float, ptr %x0, i64 %count
  %x2 = getelementptr float, ptr %x1, i64 %count
  %x3 = getelementptr float, ptr %x2, i64 %count
  br label %block
block:
  %i = phi i64 [ 0, %entry ], [ %i.next, %block.body ]
  %s00 = phi <8 x float> [ zeroinitializer, %entry ], [ %s00.next, %block.body ]
  %s01 = phi <8 x float> [ zeroinitializer, %entry ], [ %s01.next, %block.body ]
  %s02 = phi <8 x float> [ zeroinitializer, %entry ], [ %s02.next, %block.body ]
  %s03 = phi <8 x float> [ zeroinitializer, %entry ], [ %s03.next, %block.body ]
  %s10 = phi <8 x float> [ zeroinitializer, %entry ], [ %s10.next, %block.body ]
  %s11 = phi <8 x float> [ zeroinitializer, %entry ], [ %s11.next, %block.body ]
  %s12 = phi <8 x float> [ zeroinitializer, %entry ], [ %s12.next, %block.body ]
  %s13 = phi <8 x float> [ zeroinitializer, %entry ], [ %s13.next, %block.body ]
  %s20 = phi <8 x float> [ zeroinitializer, %entry ], [ %s20.next, %block.body ]
  %s21 = phi <8 x float> [ zeroinitializer, %entry ], [ %s21.next, %block.body ]
  %s22 = phi <8 x float> [ zeroinitializer, %entry ], [ %s22.next, %block.body ]
  %s23 = phi <8 x float> [ zeroinitializer, %entry ], [ %s23.next, %block.body ]
  %more = icmp ult i64 %i, %whole
  br i1 %more, label %block.body, label %end
block.body:
  %w0.8 = call <8 x float> @read_bf16s(ptr %w0, i64 %i)
  %w1.8 = call <8 x float> @read_bf16s(ptr %w1, i64 %i)
  %w2.8 = call <8 x float> @read_bf16s(ptr %w2, i64 %i)
  %x0.at = getelementptr float, ptr %x0, i64 %i
  %x0.8 = load <8 x float>, ptr %x0.at, align 4
  %s00.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w0.8, <8 x float> %x0.8, <8 x float> %s00)
  %s10.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w1.8, <8 x float> %x0.8, <8 x float> %s10)
  %s20.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w2.8, <8 x float> %x0.8, <8 x float> %s20)
  %x1.at = getelementptr float, ptr %x1, i64 %i
  %x1.8 = load <8 x float>, ptr %x1.at, align 4
  %s01.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w0.8, <8 x float> %x1.8, <8 x float> %s01)
  %s11.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w1.8, <8 x float> %x1.8, <8 x float> %s11)
  %s21.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w2.8, <8 x float> %x1.8, <8 x float> %s21)
  %x2.at = getelementptr float, ptr %x2, i64 %i
  %x2.8 = load <8 x float>, ptr %x2.at, align 4
  %s02.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w0.8, <8 x float> %x2.8, <8 x float> %s02)
  %s12.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w1.8, <8 x float> %x2.8, <8 x float> %s12)
  %s22.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w2.8, <8 x float> %x2.8, <8 x float> %s22)
  %x3.at = getelementptr float, ptr %x3, i64 %i
  %x3.8 = load <8 x float>, ptr %x3.at, align 4
  %s03.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w0.8, <8 x float> %x3.8, <8 x float> %s03)
  %s13.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w1.8, <8 x float> %x3.8, <8 x float> %s13)
  %s23.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %w2.8, <8 x float> %x3.8, <8 x float> %s23)
  %i.next = add nuw i64 %i, 8
  br label %block
end:
  %t0 = call <8 x float> @add_neighbours(<8 x float> %s00, <8 x float> %s01)
  %t1 = call <8 x float> @add_neighbours(<8 x float> %s02, <8 x float> %s03)
  %t2 = call <8 x float> @add_neighbours(<8 x float> %t0, <8 x float> %t1)
  %t3 = call <8 x float> @add_neighbours(<8 x float> %s10, <8 x float> %s11)
  %t4 = call <8 x float> @add_neighbours(<8 x float> %s12, <8 x float> %s13)
  %t5 = call <8 x float> @add_neighbours(<8 x float> %t3, <8 x float> %t4)
  %t6 = call <8 x float> @add_neighbours(<8 x float> %s20, <8 x float> %s21)
  %t7 = call <8 x float> @add_neighbours(<8 x float> %s22, <8 x float> %s23)
  %t8 = call <8 x float> @add_neighbours(<8 x float> %t6, <8 x float> %t7)
  %t9 = call <8 x float> @add_neighbours(<8 x float> %t2, <8 x float> %t5)
  %t10 = call <8 x float> @add_neighbours(<8 x float> %t8, <8 x float> zeroinitializer)
  %to.third = getelementptr float, ptr %to, i64 8
  store <8 x float> %t9, ptr %to, align 4
  store <8 x float> %t10, ptr %to.third, align 4
  %is_whole = icmp eq i64 %rest, 0
  br i1 %is_whole, label %done, label %add
add:
  %w0.rest = getelementptr i16, ptr %w0, i64 %whole
  %w1.rest = getelementptr i16, ptr %w1, i64 %whole
  %w2.rest = getelementptr i16, ptr %w2, i64 %whole
  %x0.rest = getelementptr float, ptr %x0, i64 %whole
  %x1.rest = getelementptr float, ptr %x1, i64 %whole
  %x2.rest = getelementptr float, ptr %x2, i64 %whole
  %x3.rest = getelementptr float, ptr %x3, i64 %whole
  call void @add_rest(ptr %w0.rest, ptr %x0.rest, i64 %rest, ptr %to, i64 0)
  call void @add_rest(ptr %w0.rest, ptr %x1.rest, i64 %rest, ptr %to, i64 1)
  call void @add_rest(ptr %w0.rest, ptr %x2.rest, i64 %rest, ptr %to, i64 2)
  call void @add_rest(ptr %w0.rest, ptr %x3.rest, i64 %rest, ptr %to, i64 3)
  call void @add_rest(ptr %w1.rest, ptr %x0.rest, i64 %rest, ptr %to, i64 4)
  call void @add_rest(ptr %w1.rest, ptr %x1.rest, i64 %rest, ptr %to, i64 5)
  call void @add_rest(ptr %w1.rest, ptr %x2.rest, i64 %rest, ptr %to, i64 6)
  call void @add_rest(ptr %w1.rest, ptr %x3.rest, i64 %rest, ptr %to, i64 7)
  call void @add_rest(ptr %w2.rest, ptr %x0.rest, i64 %rest, ptr %to, i64 8)
  call void @add_rest(ptr %w2.rest, ptr %x1.rest, i64 %rest, ptr %to, i64 9)
  call void @add_rest(ptr %w2.rest, ptr %x2.rest, i64 %rest, ptr %to, i64 10)
  call void @add_rest(ptr %w2.rest, ptr %x3.rest, i64 %rest, ptr %to, i64 11)
  br label %done
done:
  ret void
}

; Each pair of lanes, of one and then of the other.
define internal <8 x float> @add_neighbours(<8 x float> %one, <8 x float> %other) alwaysinline {
  %even = shufflevector <8 x float> %one, <8 x float> %other, <8 x i32> <i32 0, i32 2, i32 4, i32 6, i32 8, i32 10, i32 12, i32 14>
  %odd = shufflevector <8 x float> %one, <8 x float> %other, <8 x i32> <i32 1, i32 3, i32 5, i32 7, i32 9, i32 11, i32 13, i32 15>
  %sums = fadd <8 x float> %even, %odd
  ret <8 x float> %sums
}

; Columns that do not fill a vector.
define internal void @add_rest(ptr %weights, ptr %inputs, i64 %rest, ptr %to, i64 %index) alwaysinline {
  %at = getelementptr float, ptr %to, i64 %index
  %sum = load float, ptr %at, align 4
  %more = call float @dot_bf16(ptr %weights, ptr %inputs, i64 %rest)
  %total = fadd float %sum, %more
  store float %total, ptr %at, align 4
  ret void
}

define internal <8 x float> @read_bf16s(ptr %from, i64 %i) alwaysinline {
  %at = getelementptr i16, ptr %from, i64 %i
  %short = load <8 x i16>, ptr %at, align 2
  %wide = zext <8 x i16> %short to <8 x i32>
  %bits = shl <8 x i32> %wide, splat (i32 16)
  %values = bitcast <8 x i32> %bits to <8 x float>
  ret <8 x float> %values
}

; int8 times int16, in int32: a lane takes two products of each 64, which bounds the levels of inputs.
define internal float @dot_int8(ptr %weights, ptr %inputs, i64 %count) noinline {
entry:
  %whole = and i64 %count, -64
  br label %block
block:
  %i = phi i64 [ 0, %entry ], [ %i.next, %block.body ]
  %sums = phi <32 x i32> [ zeroinitializer, %entry ], [ %sums.next, %block.body ]
  %block.more = icmp ult i64 %i, %whole
  br i1 %block.more, label %block.body, label %reduce
block.body:
  %w.at = getelementptr i8, ptr %weights, i64 %i
  %w.ahead = getelementptr i8, ptr %w.at, i64 2048
  call void @llvm.prefetch.p0(ptr %w.ahead, i32 0, i32 3, i32 1)
  %w.short = load <64 x i8>, ptr %w.at, align 1
  %w = sext <64 x i8> %w.short to <64 x i32>
  %x.at = getelementptr i16, ptr %inputs, i64 %i
  %x.short = load <64 x i16>, ptr %x.at, align 2
  %x = sext <64 x i16> %x.short to <64 x i32>
  %products = mul nsw <64 x i32> %w, %x
  %even = shufflevector <64 x i32> %products, <64 x i32> poison, <32 x i32> <i32 0, i32 2, i32 4, i32 6, i32 8, i32 10, i32 12, i32 14, i32 16, i32 18, i32 20, i32 22, i32 24, i32 26, i32 28, i32 30, i32 32, i32 34, i32 36, i32 38, i32 40, i32 42, i32 44, i32 46, i32 48, i32 50, i32 52, i32 54, i32 56, i32 58, i32 60, i32 62>
  %odd = shufflevector <64 x i32> %products, <64 x i32> poison, <32 x i32> <i32 1, i32 3, i32 5, i32 7, i32 9, i32 11, i32 13, i32 15, i32 17, i32 19, i32 21, i32 23, i32 25, i32 27, i32 29, i32 31, i32 33, i32 35, i32 37, i32 39, i32 41, i32 43, i32 45, i32 47, i32 49, i32 51, i32 53, i32 55, i32 57, i32 59, i32 61, i32 63>
  %pairs = add nsw <32 x i32> %even, %odd
  %sums.next = add nsw <32 x i32> %sums, %pairs
  %i.next = add nuw i64 %i, 64
  br label %block
reduce:
  %sums.float = sitofp <32 x i32> %sums to <32 x float>
  %sum = call reassoc float @llvm.vector.reduce.fadd.v32f32(float 0.0, <32 x float> %sums.float)
  br label %rest
rest:
  %k = phi i64 [ %whole, %reduce ], [ %k.next, %rest.body ]
  %more = phi i32 [ 0, %reduce ], [ %more.next, %rest.body ]
  %rest.more = icmp ult i64 %k, %count
  br i1 %rest.more, label %rest.body, label %end
rest.body:
  %k.w.at = getelementptr i8, ptr %weights, i64 %k
  %k.w.short = load i8, ptr %k.w.at, align 1
  %k.w = sext i8 %k.w.short to i32
  %k.x.at = getelementptr i16, ptr %inputs, i64 %k
  %k.x.short = load i16, ptr %k.x.at, align 2
  %k.x = sext i16 %k.x.short to i32
  %product = mul nsw i32 %k.w, %k.x
  %more.next = add nsw i32 %more, %product
  %k.next = add nuw i64 %k, 1
  br label %rest
end:
  %more.float = sitofp i32 %more to float
  %total = fadd float %sum, %more.float
  ret float %total
}

; Sums of neighbouring products, which have an instruction of their own on x86.
define internal <8 x i32> @pairs(<16 x i16> %w.short, ptr %x.at) alwaysinline {
  %w = sext <16 x i16> %w.short to <16 x i32>
  %x.short = load <16 x i16>, ptr %x.at, align 2
  %x = sext <16 x i16> %x.short to <16 x i32>
  %products = mul nsw <16 x i32> %w, %x
  %even = shufflevector <16 x i32> %products, <16 x i32> poison, <8 x i32> <i32 0, i32 2, i32 4, i32 6, i32 8, i32 10, i32 12, i32 14>
  %odd = shufflevector <16 x i32> %products, <16 x i32> poison, <8 x i32> <i32 1, i32 3, i32 5, i32 7, i32 9, i32 11, i32 13, i32 15>
  %sums = add nsw <8 x i32> %even, %odd
  ret <8 x i32> %sums
}

; Groups of 64 inputs, in 16 words of 16 bits: the lowest four bits of word k are the weight of input k, the next four that
; of input 16 + k, and so on. Beside a group are 32 bits: its scale in the low half, its lowest value in the high. What
; lowest values add is a product of their own, with the sums of the groups' inputs, each in the first of 8 lanes.
define internal float @dot_int4(ptr %weights, ptr %groups, ptr %inputs, ptr %group_sums, float %input_scale, i64 %count) noinline {
entry:
  br label %group
group:
  %g = phi i64 [ 0, %entry ], [ %g.next, %group.body ]
  %scaled = phi <8 x float> [ zeroinitializer, %entry ], [ %scaled.next, %group.body ]
  %low = phi <8 x float> [ zeroinitializer, %entry ], [ %low.next, %group.body ]
  %group.more = icmp ult i64 %g, %count
  br i1 %group.more, label %group.body, label %reduce
group.body:
  %w.offset = shl i64 %g, 5
  %w.at = getelementptr i8, ptr %weights, i64 %w.offset
  %w.ahead = getelementptr i8, ptr %w.at, i64 2048
  call void @llvm.prefetch.p0(ptr %w.ahead, i32 0, i32 3, i32 1)
  %w = load <16 x i16>, ptr %w.at, align 1
  %w.shifted1 = lshr <16 x i16> %w, splat (i16 4)
  %w.shifted2 = lshr <16 x i16> %w, splat (i16 8)
  %w0 = and <16 x i16> %w, splat (i16 15)
  %w1 = and <16 x i16> %w.shifted1, splat (i16 15)
  %w2 = and <16 x i16> %w.shifted2, splat (i16 15)
  %w3 = lshr <16 x i16> %w, splat (i16 12)
  %x.offset = shl i64 %g, 6
  %x.at = getelementptr i16, ptr %inputs, i64 %x.offset
  %x0.at = getelementptr i16, ptr %x.at, i64 0
  %p0 = call <8 x i32> @pairs(<16 x i16> %w0, ptr %x0.at)
  %x1.at = getelementptr i16, ptr %x.at, i64 16
  %p1 = call <8 x i32> @pairs(<16 x i16> %w1, ptr %x1.at)
  %x2.at = getelementptr i16, ptr %x.at, i64 32
  %p2 = call <8 x i32> @pairs(<16 x i16> %w2, ptr %x2.at)
  %x3.at = getelementptr i16, ptr %x.at, i64 48
  %p3 = call <8 x i32> @pairs(<16 x i16> %w3, ptr %x3.at)
  %p01 = add nsw <8 x i32> %p0, %p1
  %p23 = add nsw <8 x i32> %p2, %p3
  %whole = add nsw <8 x i32> %p01, %p23
  %float = sitofp <8 x i32> %whole to <8 x float>
  %group.at = getelementptr i32, ptr %groups, i64 %g
  %both = load i32, ptr %group.at, align 4
  %both.one = insertelement <8 x i32> poison, i32 %both, i64 0
  %both.all = shufflevector <8 x i32> %both.one, <8 x i32> poison, <8 x i32> zeroinitializer
  %scale.bits = shl <8 x i32> %both.all, splat (i32 16)
  %scale = bitcast <8 x i32> %scale.bits to <8 x float>
  %lowest.bits = and <8 x i32> %both.all, splat (i32 -65536)
  %lowest = bitcast <8 x i32> %lowest.bits to <8 x float>
  %sum.offset = shl i64 %g, 3
  %sum.at = getelementptr float, ptr %group_sums, i64 %sum.offset
  %sum = load <8 x float>, ptr %sum.at, align 4
  %scaled.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %float, <8 x float> %scale, <8 x float> %scaled)
  %low.next = call <8 x float> @llvm.fmuladd.v8f32(<8 x float> %lowest, <8 x float> %sum, <8 x float> %low)
  %g.next = add nuw i64 %g, 1
  br label %group
reduce:
  %all = fadd <8 x float> %scaled, %low
  %dot = call reassoc float @llvm.vector.reduce.fadd.v8f32(float 0.0, <8 x float> %all)
  %total = fmul float %dot, %input_scale
  ret float %total
}

define internal void @sum_groups(ptr noalias %inputs, ptr noalias %sums, i64 %groups) {
entry:
  br label %group
group:
  %g = phi i64 [ 0, %entry ], [ %g.next, %group ]
  %x.offset = shl i64 %g, 6
  %x.at = getelementptr i16, ptr %inputs, i64 %x.offset
  %x.short = load <64 x i16>, ptr %x.at, align 2
  %x = sext <64 x i16> %x.short to <64 x i32>
  %whole = call i32 @llvm.vector.reduce.add.v64i32(<64 x i32> %x)
  %float = sitofp i32 %whole to float
  %sum = insertelement <8 x float> zeroinitializer, float %float, i64 0
  %sum.offset = shl i64 %g, 3
  %sum.at = getelementptr float, ptr %sums, i64 %sum.offset
  store <8 x float> %sum, ptr %sum.at, align 4
  %g.next = add nuw i64 %g, 1
  %done = icmp eq i64 %g.next, %groups
  br i1 %done, label %end, label %group
end:
  ret void
}

; --------------------------------------------------------------------------------------------------- kinds of weights

define internal float @one_bf16(ptr %work, i64 %row, i64 %out) alwaysinline {
  %w = load %Work, ptr %work
  %weight = extractvalue %Work %w, 0
  %inputs = extractvalue %Work %w, 2
  %ins = extractvalue %Work %w, 7
  %weight.offset = mul i64 %out, %ins
  %weight.at = getelementptr i16, ptr %weight, i64 %weight.offset
  %inputs.offset = mul i64 %row, %ins
  %inputs.at = getelementptr float, ptr %inputs, i64 %inputs.offset
  %value = call float @dot_bf16(ptr %weight.at, ptr %inputs.at, i64 %ins)
  ret float %value
}

define internal float @one_int8(ptr %work, i64 %row, i64 %out) alwaysinline {
  %w = load %Work, ptr %work
  %weight = extractvalue %Work %w, 0
  %scales = extractvalue %Work %w, 1
  %inputs = extractvalue %Work %w, 2
  %input_scales = extractvalue %Work %w, 3
  %ins = extractvalue %Work %w, 7
  %weight.offset = mul i64 %out, %ins
  %weight.at = getelementptr i8, ptr %weight, i64 %weight.offset
  %inputs.offset = mul i64 %row, %ins
  %inputs.at = getelementptr i16, ptr %inputs, i64 %inputs.offset
  %sum = call float @dot_int8(ptr %weight.at, ptr %inputs.at, i64 %ins)
  %scale.at = getelementptr float, ptr %scales, i64 %out
  %scale = load float, ptr %scale.at, align 4
  %input_scale.at = getelementptr float, ptr %input_scales, i64 %row
  %input_scale = load float, ptr %input_scale.at, align 4
  %both = fmul float %scale, %input_scale
  %value = fmul float %sum, %both
  ret float %value
}

define internal float @one_int4(ptr %work, i64 %row, i64 %out) alwaysinline {
  %w = load %Work, ptr %work
  %weight = extractvalue %Work %w, 0
  %scales = extractvalue %Work %w, 1
  %inputs = extractvalue %Work %w, 2
  %input_scales = extractvalue %Work %w, 3
  %group_sums = extractvalue %Work %w, 4
  %ins = extractvalue %Work %w, 7
  %groups = lshr i64 %ins, 6
  %bytes = lshr i64 %ins, 1
  %weight.offset = mul i64 %out, %bytes
  %weight.at = getelementptr i8, ptr %weight, i64 %weight.offset
  %scales.offset = mul i64 %out, %groups
  %scales.at = getelementptr i32, ptr %scales, i64 %scales.offset
  %inputs.offset = mul i64 %row, %ins
  %inputs.at = getelementptr i16, ptr %inputs, i64 %inputs.offset
  %sums.row = mul i64 %row, %groups
  %sums.offset = shl i64 %sums.row, 3
  %sums.at = getelementptr float, ptr %group_sums, i64 %sums.offset
  %input_scale.at = getelementptr float, ptr %input_scales, i64 %row
  %input_scale = load float, ptr %input_scale.at, align 4
  %value = call float @dot_int4(ptr %weight.at, ptr %scales.at, ptr %inputs.at, ptr %sums.at, float %input_scale, i64 %groups)
  ret float %value
}

; ----------------------------------------------------------------------------------------------------------- threads

; Each thread has a run of outputs: where it begins, or that of the thread so many further on.
define internal i64 @share_begin(ptr %work, i64 %further) {
  %outs.at = getelementptr %Work, ptr %work, i64 0, i32 6
  %outs = load i64, ptr %outs.at
  %thread.short = call i32 @omp_get_thread_num()
  %threads.short = call i32 @omp_get_num_threads()
  %thread.own = zext i32 %thread.short to i64
  %thread = add i64 %thread.own, %further
  %threads = zext i32 %threads.short to i64
  %before = mul i64 %outs, %thread
  %first = udiv i64 %before, %threads
  ret i64 %first
}

; A row of weights is read from memory for the first row of inputs alone.
define internal void @one_by_one(ptr %work, ptr %one, i64 %row.first, i64 %row.last, i64 %out.first, i64 %out.last) alwaysinline {
entry:
  %has_rows = icmp ult i64 %row.first, %row.last
  br i1 %has_rows, label %out, label %end
out:
  %o = phi i64 [ %out.first, %entry ], [ %o.next, %out.done ]
  %out.more = icmp ult i64 %o, %out.last
  br i1 %out.more, label %row, label %end
row:
  %r = phi i64 [ %row.first, %out ], [ %r.next, %row ]
  %value = call float %one(ptr %work, i64 %r, i64 %o)
  call void @write_output(ptr %work, i64 %r, i64 %o, float %value)
  %r.next = add nuw i64 %r, 1
  %row.done = icmp eq i64 %r.next, %row.last
  br i1 %row.done, label %out.done, label %row
out.done:
  %o.next = add nuw i64 %o, 1
  br label %out
end:
  ret void
}

define internal void @each_output(ptr %work, ptr %one) alwaysinline {
  %rows.at = getelementptr %Work, ptr %work, i64 0, i32 8
  %rows = load i64, ptr %rows.at
  %first = call i64 @share_begin(ptr %work, i64 0)
  %last = call i64 @share_begin(ptr %work, i64 1)
  call void @one_by_one(ptr %work, ptr %one, i64 0, i64 %rows, i64 %first, i64 %last)
  ret void
}

; Many rows: of weights as many at a time as stay in the second cache, of inputs four. What is left over goes one by one.
define internal void @each_tile(ptr %work, i64 %first, i64 %last) {
entry:
  %tile = alloca [16 x float]
  %w = load %Work, ptr %work
  %weight = extractvalue %Work %w, 0
  %inputs = extractvalue %Work %w, 2
  %ins = extractvalue %Work %w, 7
  %rows = extractvalue %Work %w, 8
  %rows.tiled = and i64 %rows, -4
  %fitting = udiv i64 65536, %ins
  %threes = udiv i64 %fitting, 3
  %threes.least = call i64 @llvm.umax.i64(i64 %threes, i64 1)
  %block.size = mul i64 %threes.least, 3
  br label %block
block:
  %b = phi i64 [ %first, %entry ], [ %b.end, %row.done ]
  %b.more = icmp ult i64 %b, %last
  br i1 %b.more, label %block.body, label %end
block.body:
  %b.next = add i64 %b, %block.size
  %b.end = call i64 @llvm.umin.i64(i64 %b.next, i64 %last)
  %b.size = sub i64 %b.end, %b
  %b.over = urem i64 %b.size, 3
  %b.tiled = sub i64 %b.end, %b.over
  br label %row
row:
  %r = phi i64 [ 0, %block.body ], [ %r.next, %row.next ]
  %r.more = icmp ult i64 %r, %rows.tiled
  br i1 %r.more, label %row.body, label %rest
row.body:
  %r.next = add i64 %r, 4
  %row.offset = mul i64 %r, %ins
  %row.at = getelementptr float, ptr %inputs, i64 %row.offset
  br label %out
out:
  %o = phi i64 [ %b, %row.body ], [ %o.next, %out.body ]
  %o.more = icmp ult i64 %o, %b.tiled
  br i1 %o.more, label %out.body, label %odd
out.body:
  %o.offset = mul i64 %o, %ins
  %o.at = getelementptr i16, ptr %weight, i64 %o.offset
  call void @tile_bf16(ptr %o.at, ptr %row.at, i64 %ins, ptr %tile)
  %tile.second = getelementptr float, ptr %tile, i64 4
  %tile.third = getelementptr float, ptr %tile, i64 8
  %o.second = add i64 %o, 1
  %o.third = add i64 %o, 2
  call void @write_four(ptr %work, i64 %r, i64 %o, ptr %tile)
  call void @write_four(ptr %work, i64 %r, i64 %o.second, ptr %tile.second)
  call void @write_four(ptr %work, i64 %r, i64 %o.third, ptr %tile.third)
  %o.next = add i64 %o, 3
  br label %out
odd:
  call void @one_by_one(ptr %work, ptr @one_bf16, i64 %r, i64 %r.next, i64 %b.tiled, i64 %b.end)
  br label %row.next
row.next:
  br label %row
rest:
  call void @one_by_one(ptr %work, ptr @one_bf16, i64 %rows.tiled, i64 %rows, i64 %b, i64 %b.end)
  br label %row.done
row.done:
  br label %block
end:
  ret void
}

define internal void @write_four(ptr %work, i64 %row, i64 %out, ptr %values) noinline {
  %at0 = getelementptr float, ptr %values, i64 0
  %value0 = load float, ptr %at0, align 4
  %row0 = add i64 %row, 0
  call void @write_output(ptr %work, i64 %row0, i64 %out, float %value0)
  %at1 = getelementptr float, ptr %values, i64 1
  %value1 = load float, ptr %at1, align 4
  %row1 = add i64 %row, 1
  call void @write_output(ptr %work, i64 %row1, i64 %out, float %value1)
  %at2 = getelementptr float, ptr %values, i64 2
  %value2 = load float, ptr %at2, align 4
  %row2 = add i64 %row, 2
  call void @write_output(ptr %work, i64 %row2, i64 %out, float %value2)
  %at3 = getelementptr float, ptr %values, i64 3
  %value3 = load float, ptr %at3, align 4
  %row3 = add i64 %row, 3
  call void @write_output(ptr %work, i64 %row3, i64 %out, float %value3)
  ret void
}

define internal void @share_bf16(ptr %work) {
  %first = call i64 @share_begin(ptr %work, i64 0)
  %last = call i64 @share_begin(ptr %work, i64 1)
  call void @each_tile(ptr %work, i64 %first, i64 %last)
  ret void
}

define internal void @share_int8(ptr %work) {
  call void @each_output(ptr %work, ptr @one_int8)
  ret void
}

define internal void @share_int4(ptr %work) {
  call void @each_output(ptr %work, ptr @one_int4)
  ret void
}

; ----------------------------------------------------------------------------------------------------------- entries

; Scratch: float32 of inputs [rows, ins], scales [rows], group sums [rows, groups, 8]; int16 of inputs [rows, ins].
define internal void @run(ptr %share, ptr %weight, ptr %scales, ptr %inputs, ptr %scratch, ptr %outputs, i64 %outs, i64 %ins, i64 %rows, i32 %threads, i1 %is_bf16, float %levels, i64 %groups) alwaysinline {
entry:
  %work = alloca %Work
  %all = mul i64 %rows, %ins
  %scratch.scales = getelementptr float, ptr %scratch, i64 %all
  %scratch.sums = getelementptr float, ptr %scratch.scales, i64 %rows
  %groups.all = mul i64 %rows, %groups
  %sums.all = shl i64 %groups.all, 3
  %scratch.whole = getelementptr float, ptr %scratch.sums, i64 %sums.all
  br i1 %is_bf16, label %from_bf16, label %wide
from_bf16:
  call void @widen(ptr %inputs, ptr %scratch, i64 %all)
  br label %wide
wide:
  %inputs.f32 = phi ptr [ %inputs, %entry ], [ %scratch, %from_bf16 ]
  %quantizes = fcmp ogt float %levels, 0.0
  br i1 %quantizes, label %row, label %start
row:
  %r = phi i64 [ 0, %wide ], [ %r.next, %row.next ]
  %row.offset = mul i64 %r, %ins
  %row.f32 = getelementptr float, ptr %inputs.f32, i64 %row.offset
  %row.whole = getelementptr i16, ptr %scratch.whole, i64 %row.offset
  %scale = call float @quantize(ptr %row.f32, ptr %row.whole, i64 %ins, float %levels)
  %scale.at = getelementptr float, ptr %scratch.scales, i64 %r
  store float %scale, ptr %scale.at, align 4
  %has_groups = icmp ne i64 %groups, 0
  br i1 %has_groups, label %sums, label %row.next
sums:
  %sums.row = mul i64 %r, %groups
  %sums.offset = shl i64 %sums.row, 3
  %sums.at = getelementptr float, ptr %scratch.sums, i64 %sums.offset
  call void @sum_groups(ptr %row.whole, ptr %sums.at, i64 %groups)
  br label %row.next
row.next:
  %r.next = add nuw i64 %r, 1
  %row.done = icmp eq i64 %r.next, %rows
  br i1 %row.done, label %start, label %row
start:
  %inputs.used = phi ptr [ %inputs.f32, %wide ], [ %scratch.whole, %row.next ]
  %w0 = insertvalue %Work poison, ptr %weight, 0
  %w1 = insertvalue %Work %w0, ptr %scales, 1
  %w2 = insertvalue %Work %w1, ptr %inputs.used, 2
  %w3 = insertvalue %Work %w2, ptr %scratch.scales, 3
  %w4 = insertvalue %Work %w3, ptr %scratch.sums, 4
  %w5 = insertvalue %Work %w4, ptr %outputs, 5
  %w6 = insertvalue %Work %w5, i64 %outs, 6
  %w7 = insertvalue %Work %w6, i64 %ins, 7
  %w8 = insertvalue %Work %w7, i64 %rows, 8
  %w9 = insertvalue %Work %w8, i1 %is_bf16, 9
  store %Work %w9, ptr %work
  call void @GOMP_parallel(ptr %share, ptr %work, i32 %threads, i32 0)
  ret void
}

define void @multiply_bf16(ptr %weight, ptr %scales, ptr %inputs, ptr %scratch, ptr %outputs, i64 %outs, i64 %ins, i64 %rows, i32 %threads, i1 zeroext %is_bf16, float %levels) {
  call void @run(ptr @share_bf16, ptr %weight, ptr %scales, ptr %inputs, ptr %scratch, ptr %outputs, i64 %outs, i64 %ins, i64 %rows, i32 %threads, i1 %is_bf16, float 0.0, i64 0)
  ret void
}

define void @multiply_int8(ptr %weight, ptr %scales, ptr %inputs, ptr %scratch, ptr %outputs, i64 %outs, i64 %ins, i64 %rows, i32 %threads, i1 zeroext %is_bf16, float %levels) {
  call void @run(ptr @share_int8, ptr %weight, ptr %scales, ptr %inputs, ptr %scratch, ptr %outputs, i64 %outs, i64 %ins, i64 %rows, i32 %threads, i1 %is_bf16, float %levels, i64 0)
  ret void
}

define void @multiply_int4(ptr %weight, ptr %scales, ptr %inputs, ptr %scratch, ptr %outputs, i64 %outs, i64 %ins, i64 %rows, i32 %threads, i1 zeroext %is_bf16, float %levels) {
  %groups = lshr i64 %ins, 6
  call void @run(ptr @share_int4, ptr %weight, ptr %scales, ptr %inputs, ptr %scratch, ptr %outputs, i64 %outs, i64 %ins, i64 %rows, i32 %threads, i1 %is_bf16, float %levels, i64 %groups)
  ret void
}

; Rows of four bits as float32 [outs, ins], for multiplications of many rows at once.
define void @unpack_int4(ptr noalias %weight, ptr noalias %scales, ptr noalias %outputs, i64 %outs, i64 %ins) {
entry:
  %row.groups = lshr i64 %ins, 6
  %groups = mul i64 %outs, %row.groups
  br label %group
group:
  %g = phi i64 [ 0, %entry ], [ %g.next, %group ]
  %group.at = getelementptr i32, ptr %scales, i64 %g
  %both = load i32, ptr %group.at, align 4
  %scale.bits = shl i32 %both, 16
  %scale.one = bitcast i32 %scale.bits to float
  %lowest.bits = and i32 %both, -65536
  %lowest.one = bitcast i32 %lowest.bits to float
  %scale.first = insertelement <16 x float> poison, float %scale.one, i64 0
  %scale = shufflevector <16 x float> %scale.first, <16 x float> poison, <16 x i32> zeroinitializer
  %lowest.first = insertelement <16 x float> poison, float %lowest.one, i64 0
  %lowest = shufflevector <16 x float> %lowest.first, <16 x float> poison, <16 x i32> zeroinitializer
  %w.offset = shl i64 %g, 5
  %w.at = getelementptr i8, ptr %weight, i64 %w.offset
  %w0 = load <16 x i16>, ptr %w.at, align 1
  %w1 = lshr <16 x i16> %w0, splat (i16 4)
  %w2 = lshr <16 x i16> %w0, splat (i16 8)
  %w3 = lshr <16 x i16> %w0, splat (i16 12)
  %to.offset = shl i64 %g, 6
  %to0 = getelementptr float, ptr %outputs, i64 %to.offset
  %to1 = getelementptr float, ptr %to0, i64 16
  %to2 = getelementptr float, ptr %to0, i64 32
  %to3 = getelementptr float, ptr %to0, i64 48
  call void @unpack_steps(<16 x i16> %w0, <16 x float> %scale, <16 x float> %lowest, ptr %to0)
  call void @unpack_steps(<16 x i16> %w1, <16 x float> %scale, <16 x float> %lowest, ptr %to1)
  call void @unpack_steps(<16 x i16> %w2, <16 x float> %scale, <16 x float> %lowest, ptr %to2)
  call void @unpack_steps(<16 x i16> %w3, <16 x float> %scale, <16 x float> %lowest, ptr %to3)
  %g.next = add nuw i64 %g, 1
  %done = icmp eq i64 %g.next, %groups
  br i1 %done, label %end, label %group
end:
  ret void
}

define internal void @unpack_steps(<16 x i16> %shifted, <16 x float> %scale, <16 x float> %lowest, ptr %to) alwaysinline {
  %short = and <16 x i16> %shifted, splat (i16 15)
  %whole = zext <16 x i16> %short to <16 x i32>
  %float = sitofp <16 x i32> %whole to <16 x float>
  %value = call <16 x float> @llvm.fmuladd.v16f32(<16 x float> %float, <16 x float> %scale, <16 x float> %lowest)
  store <16 x float> %value, ptr %to, align 4
  ret void
}

; ------------------------------------------------------------------------------------------- between matrices, bfloat16

; What a decoder layer does to a row beside its matrices (`shard.fast_layer`). Each step rounds where torch's operators
; round, and sums go in the order of torch's `mean`, so that results are theirs to the bit.

declare float @llvm.sqrt.f32(float)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1 immarg)

define internal float @rounded(float %value) alwaysinline {
  %short = call i16 @to_bf16(float %value)
  %wide = zext i16 %short to i32
  %bits = shl i32 %wide, 16
  %result = bitcast i32 %bits to float
  ret float %result
}

define internal void @write_bf16(ptr %to, i64 %i, float %value) alwaysinline {
  %short = call i16 @to_bf16(float %value)
  %at = getelementptr i16, ptr %to, i64 %i
  store i16 %short, ptr %at, align 2
  ret void
}

define internal void @add_squares(ptr noalias %sums, ptr noalias %values, i64 %count) {
entry:
  %some = icmp ne i64 %count, 0
  br i1 %some, label %each, label %end
each:
  %i = phi i64 [ 0, %entry ], [ %i.next, %each ]
  %at = getelementptr float, ptr %values, i64 %i
  %value = load float, ptr %at, align 4
  %square = fmul float %value, %value
  %sum.at = getelementptr float, ptr %sums, i64 %i
  %sum = load float, ptr %sum.at, align 4
  %more = fadd float %sum, %square
  store float %more, ptr %sum.at, align 4
  %i.next = add nuw i64 %i, 1
  %done = icmp eq i64 %i.next, %count
  br i1 %done, label %end, label %each
end:
  ret void
}

; Adds sums to others and leaves zeros.
define internal void @move_sums(ptr noalias %from, ptr noalias %to, i64 %count) {
entry:
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %i.next, %each ]
  %from.at = getelementptr float, ptr %from, i64 %i
  %to.at = getelementptr float, ptr %to, i64 %i
  %one = load float, ptr %from.at, align 4
  %other = load float, ptr %to.at, align 4
  %sum = fadd float %other, %one
  store float %sum, ptr %to.at, align 4
  store float 0.0, ptr %from.at, align 4
  %i.next = add nuw i64 %i, 1
  %done = icmp eq i64 %i.next, %count
  br i1 %done, label %end, label %each
end:
  ret void
}

; As torch sums a row (`cascade_sum`): four vectors side by side, and every 16, 256 and 4096 of them to the next level.
define internal float @sum_squares(ptr noalias %values, i64 %count, i64 %lanes) {
entry:
  %level0 = alloca [256 x float], align 64
  call void @llvm.memset.p0.i64(ptr %level0, i8 0, i64 1024, i1 false)
  %level1 = getelementptr float, ptr %level0, i64 64
  %level2 = getelementptr float, ptr %level0, i64 128
  %level3 = getelementptr float, ptr %level0, i64 192
  %width = shl i64 %lanes, 2
  %blocks = udiv i64 %count, %width
  %vectors = udiv i64 %count, %lanes
  br label %block
block:
  %b = phi i64 [ 0, %entry ], [ %b.next, %block.next ]
  %b.more = icmp ult i64 %b, %blocks
  br i1 %b.more, label %block.body, label %blocks.done
block.body:
  %b.offset = mul i64 %b, %width
  %b.at = getelementptr float, ptr %values, i64 %b.offset
  call void @add_squares(ptr %level0, ptr %b.at, i64 %width)
  %b.next = add nuw i64 %b, 1
  %b.low = and i64 %b.next, 15
  %first = icmp eq i64 %b.low, 0
  br i1 %first, label %to1, label %block.next
to1:
  call void @move_sums(ptr %level0, ptr %level1, i64 %width)
  %b.middle = and i64 %b.next, 255
  %second = icmp eq i64 %b.middle, 0
  br i1 %second, label %to2, label %block.next
to2:
  call void @move_sums(ptr %level1, ptr %level2, i64 %width)
  %b.high = and i64 %b.next, 4095
  %third = icmp eq i64 %b.high, 0
  br i1 %third, label %to3, label %block.next
to3:
  call void @move_sums(ptr %level2, ptr %level3, i64 %width)
  br label %block.next
block.next:
  br label %block
blocks.done:
  call void @move_sums(ptr %level1, ptr %level0, i64 %width)
  call void @move_sums(ptr %level2, ptr %level0, i64 %width)
  call void @move_sums(ptr %level3, ptr %level0, i64 %width)
  %vector.first = shl i64 %blocks, 2
  br label %vector
vector:
  %v = phi i64 [ %vector.first, %blocks.done ], [ %v.next, %vector.body ]
  %v.more = icmp ult i64 %v, %vectors
  br i1 %v.more, label %vector.body, label %side
vector.body:
  %v.offset = mul i64 %v, %lanes
  %v.at = getelementptr float, ptr %values, i64 %v.offset
  call void @add_squares(ptr %level0, ptr %v.at, i64 %lanes)
  %v.next = add nuw i64 %v, 1
  br label %vector
side:
  %s = phi i64 [ %lanes, %vector ], [ %s.next, %side ]
  %s.at = getelementptr float, ptr %level0, i64 %s
  call void @move_sums(ptr %s.at, ptr %level0, i64 %lanes)
  %s.next = add nuw i64 %s, %lanes
  %s.done = icmp eq i64 %s.next, %width
  br i1 %s.done, label %rest.begin, label %side
rest.begin:
  %rest.first = mul i64 %vectors, %lanes
  br label %rest
rest:
  %r = phi i64 [ %rest.first, %rest.begin ], [ %r.next, %rest.body ]
  %rest.sum = phi float [ 0.0, %rest.begin ], [ %rest.sum.next, %rest.body ]
  %r.more = icmp ult i64 %r, %count
  br i1 %r.more, label %rest.body, label %lane
rest.body:
  %r.at = getelementptr float, ptr %values, i64 %r
  %r.value = load float, ptr %r.at, align 4
  %r.square = fmul float %r.value, %r.value
  %rest.sum.next = fadd float %rest.sum, %r.square
  %r.next = add nuw i64 %r, 1
  br label %rest
lane:
  %l = phi i64 [ 0, %rest ], [ %l.next, %lane ]
  %sum = phi float [ %rest.sum, %rest ], [ %sum.next, %lane ]
  %l.at = getelementptr float, ptr %level0, i64 %l
  %l.value = load float, ptr %l.at, align 4
  %sum.next = fadd float %sum, %l.value
  %l.next = add nuw i64 %l, 1
  %l.done = icmp eq i64 %l.next, %lanes
  br i1 %l.done, label %end, label %lane
end:
  ret float %sum.next
}

; Outputs may be the inputs. Scratch: float32 [size]. Lanes: float32 in the vectors that torch sums with, 8 or 16.
define void @norm_bf16(ptr %inputs, ptr noalias %weight, ptr noalias %scratch, ptr %outputs, i64 %rows, i64 %size, float %epsilon, i64 %lanes) {
entry:
  %size.float = uitofp i64 %size to float
  br label %row
row:
  %r = phi i64 [ 0, %entry ], [ %r.next, %row.next ]
  %offset = mul i64 %r, %size
  %from = getelementptr i16, ptr %inputs, i64 %offset
  %to = getelementptr i16, ptr %outputs, i64 %offset
  call void @widen(ptr %from, ptr %scratch, i64 %size)
  %sum = call float @sum_squares(ptr %scratch, i64 %size, i64 %lanes)
  %mean = fdiv float %sum, %size.float
  %above = fadd float %mean, %epsilon
  %root = call float @llvm.sqrt.f32(float %above)
  %factor = fdiv float 1.0, %root
  br label %each
each:
  %i = phi i64 [ 0, %row ], [ %i.next, %each ]
  %at = getelementptr float, ptr %scratch, i64 %i
  %value = load float, ptr %at, align 4
  %scaled = fmul float %value, %factor
  %short = call float @rounded(float %scaled)
  %w = call float @read_bf16(ptr %weight, i64 %i)
  %weighted = fmul float %w, %short
  call void @write_bf16(ptr %to, i64 %i, float %weighted)
  %i.next = add nuw i64 %i, 1
  %i.done = icmp eq i64 %i.next, %size
  br i1 %i.done, label %row.next, label %each
row.next:
  %r.next = add nuw i64 %r, 1
  %r.done = icmp eq i64 %r.next, %rows
  br i1 %r.done, label %end, label %row
end:
  ret void
}

; Each head's first half and second half are the two parts of numbers that are turned.
define void @rotate_bf16(ptr noalias %states, ptr noalias %cos, ptr noalias %sin, i64 %heads, i64 %half) {
entry:
  %size = shl i64 %half, 1
  br label %head
head:
  %h = phi i64 [ 0, %entry ], [ %h.next, %head.next ]
  %offset = mul i64 %h, %size
  %first = getelementptr i16, ptr %states, i64 %offset
  %second = getelementptr i16, ptr %first, i64 %half
  %cos.second = getelementptr i16, ptr %cos, i64 %half
  %sin.second = getelementptr i16, ptr %sin, i64 %half
  br label %each
each:
  %i = phi i64 [ 0, %head ], [ %i.next, %each ]
  %a = call float @read_bf16(ptr %first, i64 %i)
  %b = call float @read_bf16(ptr %second, i64 %i)
  %b.turned = fneg float %b
  %cos.a = call float @read_bf16(ptr %cos, i64 %i)
  %sin.a = call float @read_bf16(ptr %sin, i64 %i)
  %cos.b = call float @read_bf16(ptr %cos.second, i64 %i)
  %sin.b = call float @read_bf16(ptr %sin.second, i64 %i)
  %a.cos = fmul float %a, %cos.a
  %a.sin = fmul float %b.turned, %sin.a
  %b.cos = fmul float %b, %cos.b
  %b.sin = fmul float %a, %sin.b
  %a.one = call float @rounded(float %a.cos)
  %a.other = call float @rounded(float %a.sin)
  %b.one = call float @rounded(float %b.cos)
  %b.other = call float @rounded(float %b.sin)
  %a.sum = fadd float %a.one, %a.other
  %b.sum = fadd float %b.one, %b.other
  call void @write_bf16(ptr %first, i64 %i, float %a.sum)
  call void @write_bf16(ptr %second, i64 %i, float %b.sum)
  %i.next = add nuw i64 %i, 1
  %i.done = icmp eq i64 %i.next, %half
  br i1 %i.done, label %head.next, label %each
head.next:
  %h.next = add nuw i64 %h, 1
  %h.done = icmp eq i64 %h.next, %heads
  br i1 %h.done, label %end, label %head
end:
  ret void
}

; The table has an activation function's value for each of the 65,536 that bfloat16 can have.
define void @gate_bf16(ptr noalias %gates, ptr noalias %table, ptr noalias %values, i64 %count) {
entry:
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %i.next, %each ]
  %gate.at = getelementptr i16, ptr %gates, i64 %i
  %gate = load i16, ptr %gate.at, align 2
  %index = zext i16 %gate to i64
  %active = call float @read_bf16(ptr %table, i64 %index)
  %value = call float @read_bf16(ptr %values, i64 %i)
  %product = fmul float %active, %value
  call void @write_bf16(ptr %values, i64 %i, float %product)
  %i.next = add nuw i64 %i, 1
  %done = icmp eq i64 %i.next, %count
  br i1 %done, label %end, label %each
end:
  ret void
}

define void @add_bf16(ptr noalias %to, ptr noalias %other, i64 %count) {
entry:
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %i.next, %each ]
  %a = call float @read_bf16(ptr %to, i64 %i)
  %b = call float @read_bf16(ptr %other, i64 %i)
  %sum = fadd float %a, %b
  call void @write_bf16(ptr %to, i64 %i, float %sum)
  %i.next = add nuw i64 %i, 1
  %done = icmp eq i64 %i.next, %count
  br i1 %done, label %end, label %each
end:
  ret void
}

; ------------------------------------------------------------------------------------------------------ a decoder layer

%Product = type { ptr, ptr, ptr, ptr, i64, i64, i32, float }  ; multiply, weight, scales, bias or null; outs, ins; most threads; levels
%Norm = type { ptr, i64, float }  ; weight, or null where there is none; size, epsilon

%Layer = type {
  %Product,  ; 0 query
  %Product,  ; 1 key
  %Product,  ; 2 value
  %Product,  ; 3 output
  %Product,  ; 4 gate
  %Product,  ; 5 up
  %Product,  ; 6 down
  %Norm,     ; 7 before attention
  %Norm,     ; 8 before the MLP
  %Norm,     ; 9 of each query head
  %Norm,     ; 10 of each key head
  ptr,       ; 11 table of the activation
  ptr,       ; 12 room for a row of hidden states
  ptr,       ; 13 for queries
  ptr,       ; 14 for keys
  ptr,       ; 15 for values
  ptr,       ; 16 for gates
  ptr,       ; 17 for what passes them
  ptr,       ; 18 scratch of products and norms
  i64,       ; 19 half a head's size
  i64        ; 20 float32 in the vectors that torch sums with
}

define internal ptr @room(ptr %layer, i32 %field) alwaysinline {
  %rooms = getelementptr %Layer, ptr %layer, i64 0, i32 11
  %at = getelementptr ptr, ptr %rooms, i32 %field
  %room = load ptr, ptr %at
  ret ptr %room
}

define internal i64 @multiply_row(ptr %layer, ptr %product, ptr %inputs, ptr %outputs, i32 %threads) {
entry:
  %scratch = call ptr @room(ptr %layer, i32 7)
  %p = load %Product, ptr %product
  %multiply = extractvalue %Product %p, 0
  %weight = extractvalue %Product %p, 1
  %scales = extractvalue %Product %p, 2
  %bias = extractvalue %Product %p, 3
  %outs = extractvalue %Product %p, 4
  %ins = extractvalue %Product %p, 5
  %threads.max = extractvalue %Product %p, 6
  %levels = extractvalue %Product %p, 7
  %threads.few = icmp ult i32 %threads, %threads.max
  %threads.used = select i1 %threads.few, i32 %threads, i32 %threads.max
  call void %multiply(ptr %weight, ptr %scales, ptr %inputs, ptr %scratch, ptr %outputs, i64 %outs, i64 %ins, i64 1, i32 %threads.used, i1 zeroext true, float %levels)
  %has_bias = icmp ne ptr %bias, null
  br i1 %has_bias, label %add, label %end
add:
  call void @add_bf16(ptr %outputs, ptr %bias, i64 %outs)
  br label %end
end:
  ret i64 %outs
}

define internal void @normalize(ptr %layer, ptr %norm, ptr %inputs, ptr %outputs, i64 %rows) {
entry:
  %n = load %Norm, ptr %norm
  %weight = extractvalue %Norm %n, 0
  %size = extractvalue %Norm %n, 1
  %epsilon = extractvalue %Norm %n, 2
  %exists = icmp ne ptr %weight, null
  br i1 %exists, label %run, label %end
run:
  %scratch = call ptr @room(ptr %layer, i32 7)
  %lanes.at = getelementptr %Layer, ptr %layer, i64 0, i32 20
  %lanes = load i64, ptr %lanes.at
  call void @norm_bf16(ptr %inputs, ptr %weight, ptr %scratch, ptr %outputs, i64 %rows, i64 %size, float %epsilon, i64 %lanes)
  br label %end
end:
  ret void
}

; From hidden states to queries, keys and values, which stay in their rooms.
define void @before_attention(ptr %layer, ptr %hidden, ptr %cos, ptr %sin, i32 %threads) {
  %row = call ptr @room(ptr %layer, i32 1)
  %queries = call ptr @room(ptr %layer, i32 2)
  %keys = call ptr @room(ptr %layer, i32 3)
  %values = call ptr @room(ptr %layer, i32 4)
  %query = getelementptr %Layer, ptr %layer, i64 0, i32 0
  %key = getelementptr %Layer, ptr %layer, i64 0, i32 1
  %value = getelementptr %Layer, ptr %layer, i64 0, i32 2
  %norm = getelementptr %Layer, ptr %layer, i64 0, i32 7
  %norm.query = getelementptr %Layer, ptr %layer, i64 0, i32 9
  %norm.key = getelementptr %Layer, ptr %layer, i64 0, i32 10
  %half.at = getelementptr %Layer, ptr %layer, i64 0, i32 19
  %half = load i64, ptr %half.at
  %head = shl i64 %half, 1
  call void @normalize(ptr %layer, ptr %norm, ptr %hidden, ptr %row, i64 1)
  %query.outs = call i64 @multiply_row(ptr %layer, ptr %query, ptr %row, ptr %queries, i32 %threads)
  %key.outs = call i64 @multiply_row(ptr %layer, ptr %key, ptr %row, ptr %keys, i32 %threads)
  %value.outs = call i64 @multiply_row(ptr %layer, ptr %value, ptr %row, ptr %values, i32 %threads)
  %query.heads = udiv i64 %query.outs, %head
  %key.heads = udiv i64 %key.outs, %head
  call void @normalize(ptr %layer, ptr %norm.query, ptr %queries, ptr %queries, i64 %query.heads)
  call void @normalize(ptr %layer, ptr %norm.key, ptr %keys, ptr %keys, i64 %key.heads)
  call void @rotate_bf16(ptr %queries, ptr %cos, ptr %sin, i64 %query.heads, i64 %half)
  call void @rotate_bf16(ptr %keys, ptr %cos, ptr %sin, i64 %key.heads, i64 %half)
  ret void
}

; From what attention gives to what the layer gives.
define void @after_attention(ptr %layer, ptr %hidden, ptr %attended, ptr %outputs, i32 %threads) {
  %table = call ptr @room(ptr %layer, i32 0)
  %row = call ptr @room(ptr %layer, i32 1)
  %gates = call ptr @room(ptr %layer, i32 5)
  %values = call ptr @room(ptr %layer, i32 6)
  %output = getelementptr %Layer, ptr %layer, i64 0, i32 3
  %gate = getelementptr %Layer, ptr %layer, i64 0, i32 4
  %up = getelementptr %Layer, ptr %layer, i64 0, i32 5
  %down = getelementptr %Layer, ptr %layer, i64 0, i32 6
  %norm = getelementptr %Layer, ptr %layer, i64 0, i32 8
  %size = call i64 @multiply_row(ptr %layer, ptr %output, ptr %attended, ptr %outputs, i32 %threads)
  call void @add_bf16(ptr %outputs, ptr %hidden, i64 %size)
  call void @normalize(ptr %layer, ptr %norm, ptr %outputs, ptr %row, i64 1)
  %gate.outs = call i64 @multiply_row(ptr %layer, ptr %gate, ptr %row, ptr %gates, i32 %threads)
  %up.outs = call i64 @multiply_row(ptr %layer, ptr %up, ptr %row, ptr %values, i32 %threads)
  call void @gate_bf16(ptr %gates, ptr %table, ptr %values, i64 %up.outs)
  %down.outs = call i64 @multiply_row(ptr %layer, ptr %down, ptr %values, ptr %row, i32 %threads)
  call void @add_bf16(ptr %outputs, ptr %row, i64 %size)
  ret void
}
